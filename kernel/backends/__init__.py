"""The backends: each offers the same operations on the same pages, see :mod:`kernel.backends.base`."""
