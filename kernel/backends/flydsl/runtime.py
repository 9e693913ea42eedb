"""Devices, and guards around FlyDSL's launch runtime.

FlyDSL's first launch loads ``libfly_jit_runtime.so`` and ends the process where HIP is missing, of another
version or lacks a symbol: :func:`preflight` loads it beforehand and raises. A HIP call that fails in a launch
is only printed, and the launch returns: :func:`launching` raises it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from kernel.errors import DeviceUnavailableError, LaunchError

TARGET = "gfx950"
"""The only architecture that the kernels are written for."""


class Device(Protocol):
    """Where launches go: a gfx950 under HIP, or the simulated one."""

    torch_device: torch.device
    """Where the tensors of a launch live."""
    compute_units: int
    """Compute units that the host plan may count on."""

    def prepare(self) -> None:
        """Make HIP loadable and check the architecture and the device, which FlyDSL does not.

        Raises:
            DeviceUnavailableError: HIP or the device is not there.
        """
        ...

    def stream(self) -> int:
        """The ``hipStream_t`` to launch on; 0 is the null stream."""
        ...

    def captures(self) -> bool:
        """Whether launches of this thread are being captured in a graph."""
        ...

    def registered(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Allows launches inside to access the tensors' storages."""
        ...

    def take_failure(self) -> BaseException | None:
        """Takes the failure of this thread's launches that the device itself recorded; None on real
        hardware."""
        ...


def runtime_path() -> Path:
    """FlyDSL's launch runtime.

    Raises:
        DeviceUnavailableError: FlyDSL is not installed, or this is not a build with the runtime.
    """
    found = importlib.util.find_spec("flydsl")
    if found is None or not found.submodule_search_locations:
        raise DeviceUnavailableError("the package flydsl is not installed", "pip install flydsl==0.5.0")
    path = Path(found.submodule_search_locations[0], "_mlir", "_mlir_libs", "libfly_jit_runtime.so")
    if not path.is_file():
        raise DeviceUnavailableError(f"{path} is missing", "pip install --force-reinstall flydsl==0.5.0")
    return path


def check() -> None:
    """Checks what a launch needs of FlyDSL, without loading anything.

    Raises:
        DeviceUnavailableError: something is missing.
    """
    runtime_path()
    if os.environ.get("COMPILE_ONLY", "0").lower() not in ("", "0", "false", "no", "off"):
        raise DeviceUnavailableError(
            f"COMPILE_ONLY={os.environ['COMPILE_ONLY']} makes every launch do nothing", "unset COMPILE_ONLY"
        )


def preflight(device: Device) -> None:
    """Raises what would end the process at the first launch, or make the launch do nothing.

    Raises:
        DeviceUnavailableError: something is missing.
    """
    check()
    device.prepare()
    _runtime()


@functools.cache
def _runtime() -> ctypes.CDLL:
    path = runtime_path()
    try:
        runtime = ctypes.CDLL(str(path))  # binds every symbol now: what is missing is an OSError
    except OSError as error:
        raise DeviceUnavailableError(
            f"{path.name} does not load: {error}",
            "install ROCm 7 (libamdhip64.so.7 with symbols of version hip_4.2), or use the simulated device",
        ) from error
    runtime.flydslRuntimeTakeError.argtypes = []
    runtime.flydslRuntimeTakeError.restype = ctypes.c_int
    runtime.hipGetErrorName.argtypes = [ctypes.c_int]  # found in the HIP library that the runtime is bound to
    runtime.hipGetErrorName.restype = ctypes.c_char_p
    return runtime


@contextmanager
def launching(device: Device, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Context of every launch: yields the stream, registers the tensors' storages, raises HIP's errors.

    Args:
        device: where the launch goes; :func:`preflight` has passed.
        tensors: every tensor whose address the launch is given.

    Raises:
        LaunchError: a HIP call failed, in the launch or before it (in a launch outside of this guard). The
            simulated device's own exception is its cause.
    """
    runtime = _runtime()
    stale, failure = runtime.flydslRuntimeTakeError(), device.take_failure()
    if stale:
        raise LaunchError(
            stale, _error_name(runtime, stale), "left by an earlier launch", "launch only inside launching()"
        ) from failure
    try:
        with device.registered(tensors):
            yield device.stream()
    finally:
        # Taken on every exit: no error is left for the next launch.
        code = runtime.flydslRuntimeTakeError()
        failure = device.take_failure()
    if isinstance(failure, (KeyboardInterrupt, SystemExit)):
        raise failure
    if code:  # decides alone, as on hardware: a call that FlyDSL can do without is no failure
        raise LaunchError(
            code,
            _error_name(runtime, code),
            str(failure) if failure is not None else "in the launch",
            "outputs are undefined; if the module failed to load, restart the process before the next launch",
        ) from failure


_STREAM_CAPTURE_UNSUPPORTED = 900


def refuse_first_launch_in_capture(device: Device, kernel: str) -> None:
    """To be called before a kernel's module is loaded: a capture does not survive that.

    Raises:
        LaunchError: a capture is under way. It goes on, without this launch.
    """
    if device.captures():
        raise LaunchError(
            _STREAM_CAPTURE_UNSUPPORTED,
            "hipErrorStreamCaptureUnsupported",
            f"the first launch of {kernel} loads its module, which a capture does not allow",
            "run the same plan once before capturing it",
        )


def _error_name(runtime: ctypes.CDLL, code: int) -> str:
    return str(runtime.hipGetErrorName(code).decode())


class RocmDevice:
    """A gfx950 under ROCm, as PyTorch sees it; see :class:`Device`.

    Args:
        torch_device: ``cuda`` or ``cuda:n``, as a ROCm build of PyTorch names its devices.

    Raises:
        DeviceUnavailableError: no ROCm build of PyTorch, no such GPU, or not a gfx950.
    """

    def __init__(self, torch_device: torch.device) -> None:
        if torch.version.hip is None:
            raise DeviceUnavailableError(
                f"PyTorch {torch.__version__} is not a ROCm build", "install PyTorch for ROCm 7"
            )
        if not torch.cuda.is_available():
            raise DeviceUnavailableError(
                "PyTorch sees no AMD GPU", "check rocm-smi, and the access to /dev/kfd and /dev/dri"
            )
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f"{torch_device} does not exist, {torch.cuda.device_count()} GPUs do", "use one of them"
            )
        properties = torch.cuda.get_device_properties(index)
        architecture = str(properties.gcnArchName).split(":")[0]
        if architecture != TARGET:
            raise DeviceUnavailableError(
                f"cuda:{index} is a {architecture}, and the kernels are for {TARGET} (MI350X, MI355X)",
                "use another backend",
            )
        self.torch_device = torch.device("cuda", index)
        self.compute_units = int(properties.multi_processor_count)

    def prepare(self) -> None:
        """Does nothing: PyTorch has loaded HIP."""

    def stream(self) -> int:
        """PyTorch's current stream on this GPU."""
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def captures(self) -> bool:
        """Whether PyTorch's current stream on this GPU is being captured."""
        with torch.cuda.device(self.torch_device):
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def registered(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Makes this GPU current: FlyDSL loads and launches on the current one."""
        del tensors  # the hardware maps every allocation
        with torch.cuda.device(self.torch_device):
            yield

    def take_failure(self) -> BaseException | None:
        """None: HIP's error codes suffice."""
        return None
