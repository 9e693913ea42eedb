"""The parts of ``kernel first-run``, each a process of its own, and what is kept of them."""


# What is run on the first MI355X: checks of every kernel, benchmarks, counters; see ``docs/gfx950.md``.
#
# A part is a process of its own, since a fault of a GPU ends the process that meets it.
