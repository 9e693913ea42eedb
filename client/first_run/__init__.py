"""The parts of ``kernel first-run``, each a process of its own, and what is kept of them."""
