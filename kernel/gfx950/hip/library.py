"""The stand-in HIP as a loaded library: its own functions' signatures, the launch as it hands it over."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kernel.errors import DeviceUnavailableError
from kernel.gfx950.hip import build


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
    library.hipGetErrorName.argtypes = [ctypes.c_int]
    library.hipGetErrorName.restype = ctypes.c_char_p
    return library


def refuse_real_hip() -> None:
    """A HIP library that is in this process before the stand-in would get the launches.

    Raises:
        DeviceUnavailableError: there is one.
    """
    standin = build.library_path()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path("/" + line.partition("/")[2])
        if path.name.startswith("libamdhip64.so") and path != standin:
            raise DeviceUnavailableError(
                f"{path} is loaded: a process has one HIP",
                "use the simulated device in a process without ROCm",
            )
