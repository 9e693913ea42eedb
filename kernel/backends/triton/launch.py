"""Kernel launches that skip what Triton's JIT does at every call.

``kernel[grid](...)`` binds arguments to a signature, works out how each is specialised, and compares the
globals that the kernel uses: 25 to 35 us a launch on a server's host, more than a small decode kernel runs.
All of that has the same result for the same integers, constants, options and pointer alignments, so the
compiled kernel is kept by them and launched directly. Layers of a step repeat them; a new step compiles
nothing, it only takes the long way once.

Only on CUDA: Triton specialises on more for HIP, and its interpreter compiles nothing. While a profiler has
hooks in Triton, launches go through them.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

_COMPILED: dict[tuple[object, ...], Any] = {}
_MOST = 4096
"""Launches that are kept; beyond, all are forgotten, and found again in Triton's own cache."""
_DIRECT = torch.version.hip is None
_ALIGNMENT = 16
"""Bytes of a pointer's alignment that Triton specialises on."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the current device and its current stream.

    Args:
        kernel: a Triton or Gluon kernel; its constants come after all other arguments.
        grid: programs, one to three dimensions.
        arguments: of the kernel, but for its constants: tensors, tensor descriptors and integers.
        options: the kernel's constants, and options of the launch.
    """
    first = arguments[0]
    if not _DIRECT or not first.is_cuda:
        kernel[grid](*arguments, **options)
        return
    key = (
        id(kernel),  # kernels are a module's, for good
        first.get_device(),
        *options.values(),
        *[argument if type(argument) is int else _pointer(argument) for argument in arguments],
    )
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key] = (compiled, constants)
        return
    compiled, constants = found
    grid = (*grid, 1, 1)[:3]
    if _has_hooks(knobs.runtime.launch_enter_hook) or _has_hooks(knobs.runtime.launch_exit_hook):
        compiled[grid](*arguments, *constants)
        return
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    compiled.run(
        *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants
    )


def _pointer(argument: Any) -> object:
    """What Triton's signature says of a pointer or a tensor descriptor."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT
    base = argument.base
    return type(argument), base.dtype, tuple(argument.block_shape), base.data_ptr() % _ALIGNMENT


def _has_hooks(chain: Any) -> bool:
    return bool(getattr(chain, "calls", chain))
