"""Pure computation on tensors: the page format, NVFP4 numerics, and the backends that insert, score and select.

No state and no I/O live here. ``kernel.errors`` imports no torch, so that a remote client can use it.
"""
