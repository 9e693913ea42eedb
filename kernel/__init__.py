"""Pure computation on tensors: page format, NVFP4 numerics, and the backends that insert, score and select.

No state and no I/O live here. ``kernel.errors`` and ``kernel.contract`` import no torch, for remote clients.
"""
