"""The kernels of one launcher: the kernel library's, else compiled at their first launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kernel.backends.flydsl import compiler_errors, kernel_cache, kernel_library, toolchain
from kernel.backends.flydsl.kernel_library import LibraryKernels
from kernel.backends.flydsl.runtime import Device, launching, preflight

if TYPE_CHECKING:
    import torch

Launch = Callable[..., None]
"""A kernel's launch: its arguments in order, the stream last as ``fx.Stream``."""
Key = TypeVar("Key", bound=Hashable)
_Key = TypeVar("_Key", bound=Hashable, contravariant=True)


class Kernels(Protocol[_Key]):
    """Kernels by what tells them apart, on one device; may be used from several threads."""

    def launch(self, key: _Key, tensors: Iterable[torch.Tensor], *arguments: int) -> None:
        """Launch; asynchronous on a GPU.

        Args:
            key: which kernel.
            tensors: every tensor whose address the launch is given.
            arguments: the launch's, without the stream.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            CompileError: the compiler refused the kernel.
            DeviceUnavailableError: there is no such kernel, and it may not be compiled here.
        """
        ...


def kernels_on(device: Device, name_of: Callable[[Key], str], build: Callable[[Key], Launch]) -> Kernels[Key]:
    """The kernels of a launcher on a device.

    Args:
        device: where launches go.
        name_of: a kernel's symbol by its key.
        build: FlyDSL's launcher of a kernel by its key; called, and FlyDSL imported, only where it is to be
            compiled.

    Raises:
        DeviceUnavailableError: what is missing there, or for compiling; or the kernel library is unfit.
    """
    path = kernel_library.chosen()
    if path is None:
        return CompiledKernels(device, name_of, build)
    return LibraryKernels(device, kernel_library.load(path, device), name_of)


class CompiledKernels(Generic[Key]):
    """Kernels that FlyDSL compiles, or loads from its cache; see :class:`Kernels`.

    Each belongs to the GPU that it was first launched on.
    """

    def __init__(self, device: Device, name_of: Callable[[Key], str], build: Callable[[Key], Launch]) -> None:
        toolchain.prepare()
        kernel_cache.prepare()
        preflight(device)
        self._device, self._name_of, self._build = device, name_of, build
        self._kernels: dict[Key, Launch] = {}
        self._compiling = threading.Lock()

    def launch(self, key: Key, tensors: Iterable[torch.Tensor], *arguments: int) -> None:
        """Launch, and compile first where this is the first time."""
        import flydsl.expr as fx

        with launching(self._device, tensors) as stream:
            kernel = self._kernels.get(key)
            if kernel is None:
                with self._compiling:
                    kernel = self._kernels.get(key)
                    if kernel is None:
                        import flydsl.compiler as flyc

                        name = self._name_of(key)
                        with kernel_cache.compiling(name), compiler_errors.raised(name):
                            # launches, and returns the same launch without tracing
                            self._kernels[key] = flyc.compile(self._build(key), *arguments, fx.Stream(stream))
                        return
            kernel(*arguments, fx.Stream(stream))
