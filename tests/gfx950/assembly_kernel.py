"""Small kernels in assembly text, for what reads instructions and runs none."""

from __future__ import annotations

import textwrap

from kernel.gfx950 import Kernel, parse_program


def kernel_of(body: str) -> Kernel:
    """A kernel named ``small`` of these instructions and labels."""
    return parse_program(f".type small,@function\nsmall:\n{textwrap.dedent(body)}").kernels["small"]
