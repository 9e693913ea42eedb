"""Kernel launches that skip what Triton's JIT does at every call.

``kernel[grid](...)`` binds arguments to a signature, works out how each is specialised, and compares the
globals that the kernel uses: 25 to 35 us a launch on a server's host, more than a small decode kernel runs.
All of that has the same result for the same integers, constants, options and pointer alignments, so the
compiled kernel is kept by them and launched directly. Layers of a step repeat more than that: only the
addresses of queries, pages and outputs change. :class:`Launches` keeps the rest of a run's launches.

Only on CUDA: Triton specialises on more for HIP, and its interpreter compiles nothing. While a profiler has
hooks in Triton, launches go through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

_COMPILED: dict[tuple[object, ...], _Compiled] = {}
_MOST = 4096
"""Launches that are kept; beyond, all are forgotten, and found again in Triton's own cache."""
_DIRECT = torch.version.hip is None
ALIGNMENT = 16
"""Bytes of a pointer's alignment that Triton specialises on."""
_BUFFER_ALIGNMENT = 512


class _Compiled(NamedTuple):
    """A compiled kernel, and its constants in the order of its arguments."""

    kernel: Any
    constants: list[Any]

    def run(self, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch on the current device and stream; ``grid`` of three, addresses may be integers."""
        kernel = self.kernel
        if _has_hooks(knobs.runtime.launch_enter_hook) or _has_hooks(knobs.runtime.launch_exit_hook):
            kernel[grid](*arguments, *self.constants)
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        kernel.run(
            *grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *arguments, *self.constants,
        )  # fmt: skip


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> _Compiled | None:
    """Launch a kernel on the current device and its current stream.

    Args:
        kernel: a Triton or Gluon kernel; its constants come after all other arguments.
        grid: programs, one to three dimensions.
        arguments: of the kernel, but for its constants: tensors, tensor descriptors and integers.
        options: the kernel's constants, and options of the launch.

    Returns:
        What was launched; None where Triton has to be asked at every launch.
    """
    first = arguments[0]
    if not _DIRECT or not first.is_cuda:
        kernel[grid](*arguments, **options)
        return None
    signature = [argument if type(argument) is int else _pointer(argument) for argument in arguments]
    key = _key(kernel, first.get_device(), options, signature)
    found = _COMPILED.get(key)
    if found is not None:
        found.run((*grid, 1, 1)[:3], arguments)
        return found
    compiled = kernel[grid](*arguments, **options)
    if len(_COMPILED) >= _MOST:
        _COMPILED.clear()
    constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
    found = _COMPILED[key] = _Compiled(compiled, constants)
    return found


def _key(
    kernel: Any, device: int, options: dict[str, Any], signature: Sequence[object]
) -> tuple[object, ...]:
    return id(kernel), device, *options.values(), *signature  # kernels are a module's, for good


def _pointer(argument: Any, address: int | None = None) -> object:
    """What Triton's signature says of a pointer or a tensor descriptor at its address, or at another."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, (argument.data_ptr() if address is None else address) % ALIGNMENT
    base = argument.base
    of_base = _pointer(base, address)
    return type(argument), of_base, tuple(argument.block_shape)


def _has_hooks(chain: Any) -> bool:
    return bool(getattr(chain, "calls", chain))


# ---- The launches of a run: all but the addresses of what changes from layer to layer ----


class Launches:
    """Launches over given tensors and a workspace, made once and then run with other tensors.

    Tensors given to a run have the shapes, strides, dtypes and alignment of the first ones. The workspace is
    allocated by torch for a run and released after it. Runs may overlap.

    Args:
        device: where to launch.
        given: tensors that change from run to run; :meth:`add` knows them by identity.
    """

    def __init__(self, device: torch.device, given: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._given = {id(tensor): position for position, tensor in enumerate(given, 1)}
        self._buffers: dict[int, int] = {}  # storages to where they start in the workspace
        self._kept: list[torch.Tensor] = []  # whose addresses stand in the launches
        self._launches: list[_Launch] = []
        self._size = 0
        self.used = 0
        """Bytes of the workspace in use; set it back to use those behind it again."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A part of the workspace: a tensor without memory, an argument of launches."""
        buffer = torch.empty(shape, dtype=dtype, device="meta")
        self._buffers[buffer.untyped_storage()._cdata] = self.used
        self._kept.append(buffer)
        self.used += -(-buffer.nbytes // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
        self._size = max(self._size, self.used)
        return buffer

    def add(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Add a launch; arguments as :func:`launch` takes them."""
        places = [self._place(argument) for argument in arguments]
        self._launches.append(_Launch(kernel, grid, arguments, places, options))

    def _place(self, argument: Any) -> tuple[int, int]:
        """Which base an argument's address is relative to, and the distance in bytes: 0 the workspace, then
        the given tensors; -1 and the value itself where nothing changes."""
        if type(argument) is int:
            return -1, argument
        tensor: torch.Tensor = argument if isinstance(argument, torch.Tensor) else argument.base
        position = self._given.get(id(tensor))
        if position is not None:
            return position, 0
        if tensor.is_meta:
            start = self._buffers[tensor.untyped_storage()._cdata]
            return 0, start + int(tensor.storage_offset()) * tensor.element_size()
        self._kept.append(tensor)
        return -1, tensor.data_ptr()

    def __call__(self, *given: torch.Tensor) -> None:
        """Launch everything on the current device and its current stream."""
        workspace = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        bases = (workspace.data_ptr(), *[tensor.data_ptr() for tensor in given])
        for one in self._launches:
            if one.compiled is None and _DIRECT and workspace.is_cuda:
                one.compiled = _COMPILED.get(one.key(bases, workspace.get_device()))
            if one.compiled is None:
                tensors = [one.tensor(at, workspace, given) for at in range(len(one.places))]
                one.compiled = launch(one.kernel, one.grid, *tensors, **one.options)
            else:
                one.compiled.run(one.whole_grid, one.addresses(bases))


class _Launch:
    """A launch of :class:`Launches`."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        places: list[tuple[int, int]],
        options: dict[str, Any],
    ) -> None:
        self.kernel, self.grid, self.places, self.options = kernel, grid, places, options
        self.whole_grid = (*grid, 1, 1)[:3]
        self.compiled: _Compiled | None = None
        # Given tensors stay the caller's: only what they are is kept.
        self._like = [
            argument.dtype if base > 0 else argument for argument, (base, _) in zip(arguments, places)
        ]
        self._descriptors = [
            at
            for at, argument in enumerate(self._like)
            if not isinstance(argument, (int, torch.Tensor, torch.dtype))
        ]

    def key(self, bases: tuple[int, ...], device: int) -> tuple[object, ...]:
        """As :func:`launch` keeps the compiled kernel."""
        signature: list[object] = []
        for like, (base, place) in zip(self._like, self.places):
            if type(like) is int:
                signature.append(like)
            elif base > 0:
                signature.append((like, (bases[base] + place) % ALIGNMENT))
            else:
                signature.append(_pointer(like, place if base < 0 else bases[base] + place))
        return _key(self.kernel, device, self.options, signature)

    def addresses(self, bases: tuple[int, ...]) -> list[Any]:
        """Arguments as a compiled kernel takes them."""
        arguments: list[Any] = [place if base < 0 else bases[base] + place for base, place in self.places]
        for at in self._descriptors:
            arguments[at] = _moved(self._like[at], _Address(arguments[at]))
        return arguments

    def tensor(self, at: int, workspace: torch.Tensor, given: Sequence[torch.Tensor]) -> Any:
        """An argument as Triton takes it."""
        (base, place), like = self.places[at], self._like[at]
        if base > 0:
            return given[base - 1]
        if base < 0:
            return like
        of: torch.Tensor = like if isinstance(like, torch.Tensor) else like.base
        words = workspace[place : place + of.nbytes].view(of.dtype)
        tensor = words.view(of.shape)
        return tensor if of is like else _moved(like, tensor)


class _Address:
    """What a tensor descriptor asks its tensor for."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def _moved(descriptor: Any, base: Any) -> Any:
    """A tensor descriptor of other memory, without the checks of a new one."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__, base=base)
    return moved
