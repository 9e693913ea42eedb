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
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from kernel import contract, plan
from kernel.backends.flydsl import geometry, toolchain
from kernel.backends.flydsl.runtime import TARGET, Device, refuse_first_launch_in_capture
from kernel.errors import DeviceUnavailableError, InvalidArgumentError, LaunchError

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
        self._loading = threading.RLock()

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
        refuse_first_launch_in_capture(self._device, name)
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


# ---- Export: kernels compiled by FlyDSL and linked into one shared library; needs no GPU ----

_LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,--strip-all")
_SYSTEM = ("-lpthread", "-ldl")
_TIMEOUT_S = 600
_TOOLS = (("ld.lld", "ld"), ("llvm-objcopy", "objcopy"))
"""Tools that FlyDSL runs to make objects: one of each, on the path."""
_INSTALL_TOOLS = "install binutils, or put ROCm's llvm/bin on the path"


def check_export() -> None:
    """Checks what exporting needs beyond compiling.

    Raises:
        DeviceUnavailableError: something is missing; names all of it, with remedies.
    """
    from kernel.gfx950.hip import standin

    missing = []
    for find in (toolchain.check, standin.compiler):
        try:
            find()
        except DeviceUnavailableError as error:
            missing.append((error.reason, error.remedy))
    absent = [" or ".join(names) for names in _TOOLS if not any(map(shutil.which, names))]
    if absent:
        missing.append((f"FlyDSL's export needs {' and '.join(absent)} on the path", _INSTALL_TOOLS))
    if missing:
        reasons, remedies = zip(*missing)
        raise DeviceUnavailableError(f"kernels cannot be exported: {', '.join(reasons)}", ", ".join(remedies))


def export_library(folder: Path, kernels: Iterable[str] | None = None) -> tuple[Path, list[str]]:
    """Compile kernels and link them.

    Args:
        folder: where the library goes, made if missing; a library there is replaced at once, so processes
            that have loaded it keep theirs.
        kernels: symbols of the kernels, one or more; all when None. A library of named ones is marked
            partial, and only such a one may lack a kernel where it is loaded.

    Returns:
        The library, and its kernels' symbols.

    Raises:
        InvalidArgumentError: there is no such kernel.
        DeviceUnavailableError: something that compiling or linking needs is missing or fails, or the folder
            cannot be written; a library there stays.
    """
    wanted = _known(kernels)
    check_export()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
            objects = Path(scratch)
            names = toolchain.export_kernels(objects, wanted)
            linked = objects / FILE_NAME
            _link([objects / f"{name}.o" for name in names], linked)
            counts = {name: _num_arguments(objects / f"{name}.h") for name in names}
            whole = objects / f"{FILE_NAME}.sealed"
            whole.write_bytes(sealed(linked.read_bytes(), counts, partial=kernels is not None))
            whole.replace(folder / FILE_NAME)
    except OSError as error:
        raise DeviceUnavailableError(
            f"the kernel library cannot be made in {folder}: {error}",
            "name a folder that can be written and has room for some megabytes",
        ) from error
    return folder / FILE_NAME, names


def _known(kernels: Iterable[str] | None) -> tuple[str, ...]:
    every = geometry.kernel_names()
    if kernels is None:
        return every
    wanted = tuple(kernels)
    unknown = sorted(set(wanted) - set(every))
    if unknown or not wanted:
        raise InvalidArgumentError(
            "kernels",
            ", ".join(map(repr, unknown)) or "none",
            f"must be some of {', '.join(every)}",
            "name some of them, or leave it out for all",
        )
    return wanted


def _num_arguments(header: Path) -> int:
    found = re.search(r"_NUM_ARGS (\d+)", header.read_text())
    if found is None:
        raise DeviceUnavailableError(
            f"FlyDSL's {header.name} has no number of arguments",
            "pip install --force-reinstall flydsl==0.5.0",
        )
    return int(found[1])


def _link(objects: list[Path], library: Path) -> None:
    from kernel.gfx950.hip import standin

    # The stand-in has the library name and symbol versions of ROCm 7's HIP, which is all that linking takes.
    command = [
        *standin.compiler(),
        *_LINK_FLAGS,
        "-o",
        str(library),
        *map(str, objects),
        str(standin.library()),
    ]
    try:
        subprocess.run([*command, *_SYSTEM], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        raise DeviceUnavailableError(
            f"{shlex.join(command[:2])} ... failed: {reason}",
            f"set CC to a working C compiler, and see that {library.parent.parent} has room",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DeviceUnavailableError(
            f"linking took over {_TIMEOUT_S} s", "set CC to a working C compiler"
        ) from error
