"""The kernel library: kernels compiled ahead, loaded and launched through ctypes without FlyDSL.

NVFP4_INDEXER_KERNEL_LIBRARY is its path; where it is not set, FlyDSL compiles. A kernel's module is loaded
once a device, at its first launch there, and again at the next launch if that failed. Failures are return
codes.

A manifest behind the library's last byte, where no loader looks, refuses a library that is cut, garbled or
made from other kernels before any of its code is mapped:

    ELF image | manifest, JSON | SHA-256 of both | length of the manifest, 8 bytes, little endian | MAGIC
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from kernel import contract, plan
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.runtime import TARGET, Device
from kernel.errors import DeviceUnavailableError, LaunchError

if TYPE_CHECKING:
    import torch


# ---- Manifest ----

MAGIC = b"nvfp4-indexer-kernels-2\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_FIELDS = {"target": str, "sources": str, "kernels": dict, "partial": bool}


class ManifestError(ValueError):
    """A file is no kernel library of this program; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """What is in a library.

    Attributes:
        target: architecture of the kernels.
        sources: digest of the sources that they, and the order of their arguments, come from.
        kernels: number of launch arguments, the stream among them, by the kernel's symbol.
        partial: it was exported with some of the kernels only.
        digest: of the ELF image and the manifest.
    """

    target: str
    sources: str
    kernels: dict[str, int]
    partial: bool
    digest: str


def sealed(image: bytes, kernels: dict[str, int], *, partial: bool) -> bytes:
    """A library of this program's kernels: the linked image, its manifest behind it."""
    fields = {"target": TARGET, "sources": sources_digest(), "kernels": kernels, "partial": partial}
    text = json.dumps(fields, sort_keys=True).encode()
    digest = hashlib.sha256(image + text).digest()
    return image + text + digest + len(text).to_bytes(_LENGTH_BYTES, "little") + MAGIC


def read(path: Path) -> Manifest:
    """The manifest of a library that fits this program.

    Raises:
        ManifestError: it does not fit.
        OSError: it cannot be read.
    """
    text, image, digest = _split(path.read_bytes())
    if digest != hashlib.sha256(image + text).digest():
        raise ManifestError("its bytes are not those that were linked")
    manifest = _parsed(text, digest.hex())
    if manifest.target != TARGET:
        raise ManifestError(f"its kernels are for {manifest.target}, not {TARGET}")
    if manifest.sources != sources_digest():
        raise ManifestError("it was made from other kernel sources than this version's")
    missing = [name for name in geometry.kernel_names() if name not in manifest.kernels]
    if missing and not manifest.partial:
        raise ManifestError(f"it holds no {', '.join(missing)}")
    return manifest


def _split(whole: bytes) -> tuple[bytes, bytes, bytes]:
    end = len(whole) - len(MAGIC) - _LENGTH_BYTES
    if end < 0 or not whole.endswith(MAGIC):
        raise ManifestError("it does not end with a manifest")
    seal = end - _DIGEST_BYTES
    start = seal - int.from_bytes(whole[end : end + _LENGTH_BYTES], "little")
    if start < 0:
        raise ManifestError("its manifest is garbled")
    return whole[start:seal], whole[:start], whole[seal:end]


def _parsed(text: bytes, digest: str) -> Manifest:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ManifestError("its manifest is garbled") from error
    if not isinstance(fields, dict) or fields.keys() != _FIELDS.keys():
        raise ManifestError("its manifest is garbled: it has other fields")
    for name, kind in _FIELDS.items():
        if type(fields[name]) is not kind:
            raise ManifestError(f"its manifest is garbled: {name} is no {kind.__name__}")
    for name, count in fields["kernels"].items():
        if type(count) is not int or count < 1:  # a bool is an int to isinstance
            raise ManifestError(f"its manifest is garbled: {name} takes {count!r} arguments")
    return Manifest(**fields, digest=digest)


@functools.cache
def sources_digest() -> str:
    """Digest of every source that a kernel or its launch is made from."""
    paths = [*Path(__file__).parent.glob("*.py"), Path(contract.__file__), Path(plan.__file__)]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda one: one.name):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# ---- Library ----

VARIABLE = "NVFP4_INDEXER_KERNEL_LIBRARY"
FILE_NAME = "nvfp4-indexer-kernels.so"
_ARGUMENT_BYTES = 8
_CURRENT_DEVICE = -1
_CODES = {-1: "module not initialised", -2: "module not loaded on this device"}
"""FlyDSL's own codes; the others are HIP's."""
_REMEDY = (
    f"make it anew with `nvfp4-indexer kernel export`, or unset {VARIABLE} to compile at the first launch"
)
_LOADED: dict[Path, str] = {}
"""Digests of the libraries that this process has loaded, by their paths."""
Key = TypeVar("Key", bound=Hashable)


class KernelLibrary:
    """A loaded library; the launches may be made from several threads.

    Args:
        loaded: the library.
        manifest: what is in it.
    """

    def __init__(self, loaded: ctypes.CDLL, manifest: Manifest) -> None:
        self._loaded, self._manifest = loaded, manifest
        loaded.hipGetErrorName.argtypes = [ctypes.c_int]  # found in the HIP library that it is bound to
        loaded.hipGetErrorName.restype = ctypes.c_char_p

    def check(self, name: str) -> None:
        """Checks that a kernel is in the library.

        Raises:
            DeviceUnavailableError: it is not.
        """
        if name not in self._manifest.kernels:
            raise _unfit(os.environ.get(VARIABLE, self._loaded._name), f"it holds no {name}")

    def load_module(self, name: str) -> int:
        """Load a kernel on the current device; returns HIP's code, 0 for success."""
        code = int(getattr(self._loaded, f"{name}__module_init")())
        return code or int(getattr(self._loaded, f"{name}__module_load")(_CURRENT_DEVICE))

    def launch(self, name: str, *arguments: int) -> int:
        """Launch on the current device, the stream last; returns HIP's code, 0 for success."""
        count = self._manifest.kernels[name]
        if len(arguments) != count:
            raise TypeError(f"{name} takes {count} arguments, not {len(arguments)}")
        # A 32-bit argument is the lower half of its 8 bytes.
        values = (ctypes.c_int64 * count)(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * count)(*range(first, first + _ARGUMENT_BYTES * count, _ARGUMENT_BYTES))
        return int(getattr(self._loaded, name)(places))

    def error_name(self, code: int) -> str:
        """A code's name."""
        return _CODES.get(code) or str(self._loaded.hipGetErrorName(code).decode())


class LibraryKernels(Generic[Key]):
    """A launcher's kernels, of the library; see :class:`kernel.backends.flydsl.launch.Kernels`."""

    def __init__(self, device: Device, library: KernelLibrary, name_of: Callable[[Key], str]) -> None:
        self._device, self._library, self._name_of = device, library, name_of
        self._on_device: set[str] = set()
        self._loading = threading.Lock()

    def launch(self, key: Key, tensors: Iterable[torch.Tensor], *arguments: int) -> None:
        """Launch; loads the module at the first launch."""
        name = self._name_of(key)
        self._library.check(name)
        self._device.take_failure()  # left by other calls
        with self._device.registered(tensors):
            self._load(name)
            code = self._library.launch(name, *arguments, self._device.stream())
        self._raise(code, f"in the launch of {name}", "outputs are undefined; the next launch starts afresh")

    def _load(self, name: str) -> None:
        if name in self._on_device:
            return
        with self._loading:
            code = self._library.load_module(name)
            remedy = "nothing was launched; free device memory if it ran out: the next launch loads it again"
            self._raise(code, f"the module of {name} did not load", remedy)
            self._on_device.add(name)

    def _raise(self, code: int, reason: str, remedy: str) -> None:
        failure = self._device.take_failure()
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            raise failure
        if code:
            account = reason if failure is None else f"{reason}: {failure}"
            raise LaunchError(code, self._library.error_name(code), account, remedy) from failure


def chosen() -> Path | None:
    """The library that the environment names, if any."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def check(path: Path) -> Manifest:
    """The manifest of a library, without loading it.

    Raises:
        DeviceUnavailableError: it is missing, garbled, of another version or architecture, or lacks kernels
            that it was not exported without.
    """
    try:
        return read(path)
    except ManifestError as error:
        raise _unfit(path, str(error)) from error
    except OSError as error:
        raise _unfit(path, error.strerror or str(error)) from error


def load(path: Path, device: Device) -> KernelLibrary:
    """Load a library, HIP first.

    Raises:
        DeviceUnavailableError: see :func:`check`; or the device or HIP is not there, or the file is not the
            one that this process has loaded.
    """
    device.prepare()
    try:
        found = path.stat()
    except OSError as error:
        raise _unfit(path, error.strerror or str(error)) from error
    return _load(path.resolve(), found.st_mtime_ns, found.st_size)


@functools.cache
def _load(path: Path, _modified_ns: int, _size: int) -> KernelLibrary:
    manifest = check(path)
    if _LOADED.get(path, manifest.digest) != manifest.digest:
        # The dynamic loader would return the old one, which this manifest does not describe.
        raise DeviceUnavailableError(
            f"{VARIABLE}={path} was replaced after this process had loaded it", "start a new process"
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceUnavailableError(
            f"{VARIABLE}={path} does not load: {error}",
            "install ROCm 7 (libamdhip64.so.7 with symbols of version hip_4.2), or use the simulated device",
        ) from error
    _LOADED[path] = manifest.digest
    return KernelLibrary(loaded, manifest)


def _unfit(path: Path | str, reason: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(f"{VARIABLE}={path}: the kernel library cannot be used: {reason}", _REMEDY)
