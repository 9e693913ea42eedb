"""A gfx950 without a gfx950: HIP's calls go to the stand-in, launches to the interpreter."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel.errors import DeviceUnavailableError, IndexerError
from kernel.gfx950 import (
    Memory,
    OutOfBoundsError,
    Program,
    RunOptions,
    RunReport,
    Schedule,
    check_hazards,
    parse_program,
    run,
)
from kernel.gfx950.hip import code_object, standin
from kernel.gfx950.hip.code_object import kernarg_segment
from kernel.gfx950.hip.standin import LAUNCH_CALLBACK, Launch

# ---- Host memory that a launch may touch: the elements of its tensors ----


@dataclass(frozen=True)
class Allocation:
    """``size`` bytes at ``address``."""

    address: int
    size: int
    name: str

    @property
    def end(self) -> int:
        return self.address + self.size


def extents(tensors: Iterable[torch.Tensor]) -> list[Allocation]:
    """From the first to the last element of each tensor; tensors that overlap are one allocation.

    Raises:
        ValueError: a tensor is not on the CPU.
    """
    found: list[Allocation] = []
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"tensors[{position}].device = {tensor.device}: the simulated device's memory is the CPU's"
            )
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            size = (last + 1) * tensor.element_size()
            name = f"tensor {position} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            found.append(Allocation(tensor.data_ptr(), size, name))
    return merged(found)


def merged(allocations: Iterable[Allocation]) -> list[Allocation]:
    """The same bytes as allocations that do not overlap, in order of address."""
    result: list[Allocation] = []
    for allocation in sorted(allocations, key=lambda a: a.address):
        if result and allocation.address < result[-1].end:
            last = result.pop()
            end = max(last.end, allocation.end)
            allocation = Allocation(last.address, end - last.address, f"{last.name} and {allocation.name}")
        result.append(allocation)
    return result


# ---- The device ----

ARCHITECTURE = "gfx950"
COMPUTE_UNITS = 256
"""Compute units of an MI355X."""
_HIP_ERROR_ILLEGAL_ADDRESS = 700
_HIP_ERROR_LAUNCH_FAILURE = 719
_KEPT_LAUNCHES = 64
_ARCHITECTURE_VARIABLES = ("FLYDSL_GPU_ARCH", "ARCH")


class HipCallError(IndexerError, RuntimeError):
    """A HIP call that the stand-in refused, or that was made to fail."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} returned {name} ({code})")
        self.call = call
        self.code = code


@dataclass(frozen=True)
class PreparedLaunch:
    """One kernel launch, with a copy of everything that it needs but the memory that it accesses."""

    kernel: str
    grid: tuple[int, int, int]
    """Workgroups."""
    block: tuple[int, int, int]
    """Threads of a workgroup."""
    kernargs: bytes
    """The kernel argument segment."""
    dynamic_lds: int
    """Bytes."""
    image: bytes
    """The code object."""
    program: Program
    allocations: list[Allocation]
    """What it may touch."""


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch that ran."""

    kernel: str
    grid: tuple[int, int, int]
    """Workgroups."""
    block: tuple[int, int, int]
    """Threads of a workgroup."""
    kernargs: bytes
    """The kernel argument segment."""
    image: bytes
    """The code object."""
    report: RunReport
    seconds: float
    """Host time in the interpreter."""


class SimulatedDevice:
    """One gfx950, synchronous. Device memory is host memory: a CPU tensor's address is its device address.

    Get it from :func:`simulated_device`: a process has one HIP, and its launches go to one device.

    Attributes:
        schedule: the order of waves, workgroups and DMA in the launches to come.
        options: what else the interpreter is told.
        launches: the last launches, oldest first.
    """

    torch_device = torch.device("cpu")
    compute_units = COMPUTE_UNITS

    def __init__(self) -> None:
        self.schedule = Schedule()
        self.options = RunOptions()
        self.launches: deque[LaunchRecord] = deque(maxlen=_KEPT_LAUNCHES)
        self._library: ctypes.CDLL | None = None
        self._callback = LAUNCH_CALLBACK(self._on_launch)  # lives as long as the library may call it
        self._one_launch = threading.RLock()
        self._one_capture = threading.Lock()
        self._thread = threading.local()

    def check(self) -> str:
        """What :meth:`prepare` needs, without building or loading anything.

        Returns:
            What was found, human-readable.

        Raises:
            DeviceUnavailableError: what is missing and the remedy.
        """
        for variable in _ARCHITECTURE_VARIABLES:
            asked = os.environ.get(variable)
            if asked and asked.lower() != ARCHITECTURE:
                raise DeviceUnavailableError(
                    f"{variable}={asked}: the simulated device is a {ARCHITECTURE}", f"unset {variable}"
                )
        if self._library is None:
            standin.refuse_real_hip()
        builder = "built before" if standin.is_built() else f"to be built by {shlex.join(standin.compiler())}"
        return f"stand-in HIP {builder}, disassembler {code_object.find().source}"

    def prepare(self) -> None:
        """Build and load the stand-in, before anything loads HIP; have FlyDSL compile for gfx950.

        Raises:
            DeviceUnavailableError: a real HIP is in the process, another architecture is asked for, or the
                stand-in cannot be built or used.
        """
        self.check()
        os.environ.setdefault("FLYDSL_GPU_ARCH", ARCHITECTURE)
        if self._library is None:
            self._library = standin.load(standin.library())
            self._library.sim_set_launch(self._callback)

    def stream(self) -> int:
        """The stream that this thread captures, else the null stream: everything is done in order anyway."""
        recording = self._recording
        return 0 if recording is None else recording.stream

    def captures(self) -> bool:
        """Whether this thread's launches are being captured."""
        return self._recording is not None

    @contextmanager
    def capturing(self) -> Iterator[Recording]:
        """Capture this thread's launches instead of running them, as PyTorch captures a stream on a GPU.

        What HIP refuses in a capture is refused, in every thread: allocations, synchronous copies, waits,
        work on the null stream; also loading modules. As in HIP, a refused call invalidates the capture.

        Yields:
            The recording, complete after the context.

        Raises:
            HipCallError: on exit without an exception, if a call was refused.
            RuntimeError: within a capture of this thread.
        """
        if self._recording is not None:
            raise RuntimeError("a capture of this thread is under way; end it first")
        loaded = self._loaded()
        stream = ctypes.c_void_p()
        with self._one_capture:
            loaded.hipStreamCreate(ctypes.byref(stream))
            loaded.sim_begin_capture(stream)
            self._thread.recording = recording = Recording(self, stream.value or 0)
            try:
                with _TorchOperations(recording):
                    yield recording
            finally:
                self._thread.recording = None
                code = loaded.sim_end_capture()
                loaded.hipStreamDestroy(stream)
            if code:
                raise HipCallError("hipStreamEndCapture", code, loaded.hipGetErrorName(code).decode())

    @contextmanager
    def registered(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let launches of this thread inside touch these tensors' elements, and nothing else.

        Raises:
            ValueError: a tensor is not on the CPU.
        """
        outer, recording, tensors = self._allocations(), self._recording, list(tensors)
        if recording is not None:
            recording.kept += tensors
        self._thread.allocations = merged(outer + extents(tensors))
        try:
            yield
        finally:
            self._thread.allocations = outer

    def take_failure(self) -> BaseException | None:
        """Returns, and forgets, why this thread's launches failed: the kernel's fault, or the HIP call's."""
        failure: BaseException | None = getattr(self._thread, "failure", None)
        self._thread.failure = None
        loaded = self._loaded()
        code = ctypes.c_int()
        call = loaded.sim_take_failure(ctypes.byref(code))
        if failure is None and call is not None:
            return HipCallError(call.decode(), code.value, loaded.hipGetErrorName(code.value).decode())
        return failure

    @contextmanager
    def failing(self, call: str, code: int = _HIP_ERROR_LAUNCH_FAILURE) -> Iterator[None]:
        """Make every call of the HIP function ``call`` inside, by any thread, return ``code`` and do nothing.

        Raises:
            ValueError: no such function.
            RuntimeError: on exit without an exception, when nothing called it: the test has tested nothing.
        """
        loaded = self._loaded()
        if not hasattr(loaded, call):
            raise ValueError(f"call = {call!r}: not a function of the stand-in HIP")
        before = self.calls().get(call, 0)
        loaded.sim_fail(call.encode(), code)
        try:
            yield
        finally:
            loaded.sim_fail(b"", 0)
        if self.calls().get(call, 0) == before:
            raise RuntimeError(f"{call} was not called, so its failure was not tested")

    def calls(self) -> dict[str, int]:
        """How often each HIP function was called in this process."""
        loaded = self._loaded()
        found: dict[str, int] = {}
        count = ctypes.c_uint64()
        while (name := loaded.sim_call(len(found), ctypes.byref(count))) is not None:
            found[name.decode()] = count.value
        return found

    def _loaded(self) -> ctypes.CDLL:
        if self._library is None:
            self.prepare()
            assert self._library is not None  # noqa: S101  prepare() raises or sets it
        return self._library

    def _allocations(self) -> list[Allocation]:
        found: list[Allocation] = getattr(self._thread, "allocations", [])
        return found

    @property
    def _recording(self) -> Recording | None:
        found: Recording | None = getattr(self._thread, "recording", None)
        return found

    def _on_launch(self, pointer: ctypes._Pointer[Launch]) -> int:
        try:
            launch, recording = self._prepared(pointer.contents), self._recording
            if recording is None:
                self.run(launch)
            else:
                recording.steps.append(partial(self.run, launch))
        except OutOfBoundsError as error:
            self._thread.failure = error
            return _HIP_ERROR_ILLEGAL_ADDRESS
        except BaseException as error:  # nothing may leave a callback: ctypes would print it and go on
            self._thread.failure = error
            return _HIP_ERROR_LAUNCH_FAILURE
        return 0

    def _prepared(self, launch: Launch) -> PreparedLaunch:
        name = launch.kernel.decode()
        loaded, program = _program(ctypes.string_at(launch.image, launch.image_size), name)
        kernel = loaded.kernels[name]
        grid, block = _dimensions(launch.grid), _dimensions(launch.block)
        if kernel.required_block is not None and block != kernel.required_block:
            raise ValueError(f"block = {block}: {name} was compiled for {kernel.required_block}")
        if block[0] * block[1] * block[2] > kernel.max_block:
            raise ValueError(f"block = {block}: {name} was compiled for at most {kernel.max_block} threads")
        kernargs = kernarg_segment(kernel.metadata, launch.kernel_params, grid, block)
        return PreparedLaunch(
            name, grid, block, kernargs, launch.dynamic_lds, loaded.image, program, self._allocations()
        )

    def run(self, launch: PreparedLaunch) -> None:
        """Run a launch now.

        Raises:
            InterpreterError: the kernel is wrong.
        """
        memory = Memory(resolve=self._resolve)
        for allocation in launch.allocations:
            memory.register(allocation.address, allocation.size, allocation.name)
        name, grid, block, kernargs = launch.kernel, launch.grid, launch.block, launch.kernargs
        with self._one_launch:
            started = time.perf_counter()
            report = run(
                launch.program, name, grid=grid, block=block, kernargs=kernargs, memory=memory,
                schedule=self.schedule, options=replace(self.options, dynamic_lds_bytes=launch.dynamic_lds),
            )  # fmt: skip
            seconds = time.perf_counter() - started
            self.launches.append(LaunchRecord(name, grid, block, kernargs, launch.image, report, seconds))

    def _resolve(self, address: int) -> tuple[int, int] | None:
        """The live hipMalloc allocation that holds an address."""
        loaded = self._loaded()
        pairs = ((ctypes.c_uint64 * 2) * int(loaded.sim_allocations(None, 0)))()
        loaded.sim_allocations(pairs, len(pairs))
        for base, size in pairs:
            if base <= address < base + size:
                return base, size
        return None


# ---- Captures ----


@dataclass(eq=False)
class Recording:
    """What a capture holds: launches with their argument bytes, and torch's operations between them.

    Attributes:
        device: where to replay.
        stream: the captured one.
        steps: what a replay does, in order.
        kept: the launches' tensors. Workspaces that a run allocates stay alive with the recording; on a GPU,
            PyTorch's graph has a memory pool of its own for them.
    """

    device: SimulatedDevice
    stream: int
    steps: list[Callable[[], object]] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)

    def replay(self) -> None:
        """Do it all again, on what the tensors then hold.

        Raises:
            InterpreterError: a kernel is wrong.
            RuntimeError: within a capture of this thread.
        """
        if self.device.captures():
            raise RuntimeError("a replay within a capture is not simulated; end the capture first")
        for step in self.steps:
            step()


_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _TorchOperations(TorchDispatchMode):
    """Records what torch itself computes; unlike a GPU's, a capture here also does it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = recording.steps

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        again = partial(operator, *args, **(kwargs or {}))
        if operator.namespace != "aten":  # ours: what it asks of torch is recorded
            with self:
                return operator.redispatch(_ON_CPU, *args, **(kwargs or {}))
        result = again()
        if operator._schema.is_mutable:
            self._steps.append(again)
        elif isinstance(result, torch.Tensor) and not (operator.is_view or "empty" in operator.name()):
            self._steps.append(lambda: result.copy_(again()))
        return result


@functools.cache
def simulated_device() -> SimulatedDevice:
    """The device of this process; there is one, as there is one HIP."""
    return SimulatedDevice()


@functools.lru_cache(maxsize=64)
def _program(image: bytes, name: str) -> tuple[code_object.CodeObject, Program]:
    loaded = code_object.parse(image)
    if loaded.target.rpartition("-")[2].partition(":")[0] != ARCHITECTURE:
        raise ValueError(f"code object for {loaded.target}: the simulated device is a {ARCHITECTURE}")
    kernel = loaded.kernels[name]
    program = parse_program(code_object.listing(loaded, kernel), {name: kernel.metadata})
    # The interpreter has no clock: it would give the right result where the device reads a stale register.
    check_hazards(program.kernels[name])
    return loaded, program


def _dimensions(array: ctypes.Array[ctypes.c_uint32]) -> tuple[int, int, int]:
    x, y, z = array
    return int(x), int(y), int(z)
