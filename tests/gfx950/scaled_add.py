"""A FlyDSL kernel of the tests' own, as small as one can be: ``out = x * scale + y``."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.expr.typing import T

from kernel.backends.flydsl import toolchain
from kernel.backends.flydsl.runtime import Device, launching, preflight

THREADS = 64


@flyc.kernel(name="scaled_add", known_block_size=[THREADS, 1, 1])  # type: ignore[untyped-decorator]
def _kernel(x: fx.Int64, y: fx.Int64, out: fx.Int64, scale: fx.Float32, n: fx.Int32) -> None:
    i = fx.Int32(fx.block_idx.x) * THREADS + fx.Int32(fx.thread_idx.x)
    f32 = fx.PointerType.get(T.f32, fx.AddressSpace.Global, 4)
    x_values, y_values, out_values = (fx.inttoptr(f32, address) for address in (x, y, out))
    if i < n:
        out_values[i] = x_values[i] * scale + y_values[i]


@flyc.jit  # type: ignore[untyped-decorator]
def _launch(
    x: fx.Int64,
    y: fx.Int64,
    out: fx.Int64,
    scale: fx.Float32,
    n: fx.Int32,
    workgroups: fx.Int32,
    stream: fx.Stream,
) -> None:
    _kernel(x, y, out, scale, n).launch(grid=(workgroups, 1, 1), block=(THREADS, 1, 1), stream=stream)


def prepare(device: Device) -> None:
    """What must be there before the first launch."""
    toolchain.prepare_linker()
    preflight(device)


def scaled_add(
    device: Device,
    x: torch.Tensor,
    y: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    n: int | None = None,
    registered: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """``out[i] = x[i] * scale + y[i]`` for ``i < n``; float32. ``registered``: what the launch may touch."""
    n = x.numel() if n is None else n
    with launching(device, (x, y, out) if registered is None else registered) as stream:
        launch_unguarded(x.data_ptr(), y.data_ptr(), out.data_ptr(), scale, n, stream)


def launch_unguarded(x: int, y: int, out: int, scale: float, n: int, stream: int = 0) -> None:
    """The launch alone, on addresses; FlyDSL swallows its errors."""
    _launch(x, y, out, scale, n, -(-n // THREADS), fx.Stream(stream))
