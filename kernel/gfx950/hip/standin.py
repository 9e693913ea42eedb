"""The stand-in HIP as a loaded library: its own functions' signatures, the launch as it hands it over."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel.errors import DeviceUnavailableError

# ---- Build: ``libamdhip64.so.7``, on first use, into the user's cache ----

LIBRARY_NAME = "libamdhip64.so.7"

SOURCE = Path(__file__).with_name("standin.c")
"""The library, its functions marked by EXPORT."""
_VERSIONS = Path(__file__).with_name("standin.map")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,defs")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 600  # a first zig cc builds its C library too, on a busy machine in over a minute


def compiler() -> list[str]:
    """The command of a C compiler: ``$CC``, else the first of cc, gcc, clang, the ``ziglang`` package.

    Raises:
        DeviceUnavailableError: there is none.
    """
    asked = os.environ.get("CC")
    if asked:
        command = shlex.split(asked)
        if not command or shutil.which(command[0]) is None:
            raise DeviceUnavailableError(f"CC={asked} is not a command", "unset CC or set it to a C compiler")
        return command
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise DeviceUnavailableError(
        f"no C compiler ({', '.join(_COMPILERS)}) is on the path",
        "install gcc or clang, pip install ziglang, or set CC",
    )


def library() -> Path:
    """The built library: from the cache, or compiled now.

    Raises:
        DeviceUnavailableError: no compiler, it fails, or the cache folder cannot be written.
    """
    path = library_path()
    if not is_built():
        _compile(path)
    return path


def library_path() -> Path:
    """Where the library is, once it is built."""
    return (_cache_folder() / _build_key() / LIBRARY_NAME).resolve()


def is_built() -> bool:
    """Whether :func:`library` needs no compiler any more."""
    return library_path().is_file()


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root if root else Path.home() / ".cache") / "nvfp4-indexer" / "hip-standin"


def _build_key() -> str:
    content = b"\0".join([SOURCE.read_bytes(), _VERSIONS.read_bytes(), *(flag.encode() for flag in _FLAGS)])
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(path: Path) -> None:
    command = compiler()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A folder beside the result: the rename is atomic, and processes that build at once do not meet.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch, LIBRARY_NAME)
            _run_compiler([
                *command, *_FLAGS, f"-Wl,-soname,{LIBRARY_NAME}", f"-Wl,--version-script={_VERSIONS}",
                "-o", str(built), str(SOURCE), "-lpthread",
            ])  # fmt: skip
            built.replace(path)
    except OSError as error:
        raise DeviceUnavailableError(
            f"the stand-in HIP cannot be built in {path.parent}: {error}",
            "set XDG_CACHE_HOME to a folder that can be written",
        ) from error


def _run_compiler(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise DeviceUnavailableError(
            f"{shlex.join(command)} failed: {error.stderr.strip()}",
            "set CC to a working C compiler for Linux",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DeviceUnavailableError(
            f"{shlex.join(command)} took over {_TIMEOUT_S} s", "set CC to a working C compiler for Linux"
        ) from error


class Launch(ctypes.Structure):
    """``struct launch`` of standin.c."""

    _fields_ = (
        ("image", ctypes.c_void_p),
        ("image_size", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_lds", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("kernel_params", ctypes.c_void_p),
    )


LAUNCH_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


def load(path: Path) -> ctypes.CDLL:
    """Load the stand-in, so that FlyDSL's runtime binds to it.

    Raises:
        DeviceUnavailableError: it does not load.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceUnavailableError(f"{path} does not load: {error}", f"delete {path.parent}") from error
    library.sim_set_launch.argtypes = [LAUNCH_CALLBACK]
    library.sim_set_launch.restype = None
    library.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.sim_call.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64)]
    library.sim_call.restype = ctypes.c_char_p
    library.sim_take_failure.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.sim_take_failure.restype = ctypes.c_char_p
    library.sim_allocations.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.sim_allocations.restype = ctypes.c_size_t
    library.sim_begin_capture.argtypes = [ctypes.c_void_p]
    library.sim_begin_capture.restype = None
    library.sim_end_capture.restype = ctypes.c_int
    library.hipGetErrorName.argtypes = [ctypes.c_int]
    library.hipGetErrorName.restype = ctypes.c_char_p
    return library


def refuse_real_hip() -> None:
    """A HIP library that is in this process before the stand-in would get the launches.

    Raises:
        DeviceUnavailableError: there is one.
    """
    standin = library_path()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path("/" + line.partition("/")[2])
        if path.name.startswith("libamdhip64.so") and path != standin:
            raise DeviceUnavailableError(
                f"{path} is loaded: a process has one HIP",
                "use the simulated device in a process without ROCm",
            )
