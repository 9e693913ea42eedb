"""FlyDSL's own launcher on the simulated device, with a kernel that belongs to no backend."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel.backends.flydsl.runtime import launching
from kernel.errors import DeviceUnavailableError, LaunchError
from kernel.gfx950 import SCHEDULES, OutOfBoundsError, Schedule, UnsupportedInstructionError
from kernel.gfx950.hip import HipCallError, SimulatedDevice, code_object, simulated_device, standin
from tests.gfx950.scaled_add import THREADS, launch_unguarded, prepare, scaled_add

N = 3 * THREADS + 17  # a last workgroup that is not full


@pytest.fixture(scope="module")
def device() -> SimulatedDevice:
    found = simulated_device()
    prepare(found)
    return found


@pytest.fixture(autouse=True)
def default_schedule(device: SimulatedDevice) -> Iterator[None]:
    yield
    device.schedule = Schedule()


def operands(n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y and an output full of NaN."""
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(2, n, generator=generator)
    return x, y, torch.full((n,), float("nan"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_a_kernel(device: SimulatedDevice, schedule: Schedule) -> None:
    device.schedule = schedule
    x, y, out = operands()
    scaled_add(device, x, y, out, 0.5)
    assert torch.equal(out, x * 0.5 + y)
    launch = device.launches[-1]
    assert (launch.kernel, launch.grid, launch.block) == ("scaled_add", (4, 1, 1), (THREADS, 1, 1))
    assert launch.kernargs[:8] == x.data_ptr().to_bytes(8, "little")


@pytest.mark.parametrize("n", [1, THREADS - 1, THREADS, THREADS + 1])
def test_bounds_of_the_grid(device: SimulatedDevice, n: int) -> None:
    x, y, out = operands(n)
    scaled_add(device, x, y, out, -2.0)
    assert torch.equal(out, x * -2.0 + y)


def test_touches_nothing_but_its_output(device: SimulatedDevice) -> None:
    x, y, _ = operands()
    around = torch.full((N + 20,), float("nan"))
    scaled_add(device, x, y, around[10:-10], 1.0)
    assert torch.equal(around[10:-10], x + y)
    assert around[:10].isnan().all()
    assert around[-10:].isnan().all()


def test_an_access_past_a_tensor_names_the_place(device: SimulatedDevice) -> None:
    x, y, out = operands()
    short = x[: N - 1]  # in the same storage: what is allowed are the tensor's elements
    with pytest.raises(LaunchError, match="hipErrorIllegalAddress") as caught:
        scaled_add(device, short, y, out, 1.0, n=N)
    cause = caught.value.__cause__
    assert isinstance(cause, OutOfBoundsError)
    assert cause.workgroup == (3, 0, 0)
    assert cause.text is not None
    assert "global_load_dword" in cause.text
    assert cause.text in str(caught.value)
    assert cause.lane == N - 1 - 3 * THREADS


def test_a_tensor_that_was_not_registered(device: SimulatedDevice) -> None:
    x, y, out = operands()
    with pytest.raises(LaunchError, match="in no registered memory"):
        scaled_add(device, x, y, out, 1.0, registered=(x, y))
    assert out.isnan().all()
    scaled_add(device, x, y, out, 1.0)  # and the device lives
    assert torch.equal(out, x + y)


def test_a_tensor_of_another_device_is_refused(device: SimulatedDevice) -> None:
    x, y, out = operands()
    with pytest.raises(ValueError, match="the simulated device's memory is the CPU's"):
        scaled_add(device, x, y, out, 1.0, registered=(x, torch.empty(4, device="meta")))


def test_memory_that_hip_allocated(device: SimulatedDevice) -> None:
    """It needs no registration, and it is gone when it is freed."""
    x, y, out = operands()
    hip = ctypes.CDLL(str(standin.library()))  # the one that is loaded
    allocated = ctypes.c_void_p()
    assert hip.hipMalloc(ctypes.byref(allocated), ctypes.c_size_t(4 * N)) == 0
    assert allocated.value is not None
    address = allocated.value
    assert hip.hipMemcpy(allocated, ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(4 * N), 1) == 0
    with launching(device, [y, out]):
        launch_unguarded(address, y.data_ptr(), out.data_ptr(), 1.0, N)
    assert torch.equal(out, x + y)
    assert hip.hipFree(allocated) == 0
    with pytest.raises(LaunchError, match="in no registered memory"), launching(device, [y, out]):
        launch_unguarded(address, y.data_ptr(), out.data_ptr(), 1.0, N)
    assert hip.hipFree(allocated) != 0, "freed already"
    device.take_failure()


def test_threads_launch_one_after_another(device: SimulatedDevice) -> None:
    """Each thread's tensors and errors are its own."""
    outcomes: dict[int, object] = {}

    def work(index: int) -> None:
        x, y, out = operands(THREADS + index)
        try:
            scaled_add(device, x, y, out, 1.0, registered=(x, y) if index == 1 else None)
            outcomes[index] = torch.equal(out, x + y)
        except LaunchError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0] is True
    assert isinstance(outcomes[1], LaunchError)
    assert outcomes[2] is True


@pytest.mark.parametrize("call", ["hipModuleGetFunction", "hipModuleLaunchKernel"])
@pytest.mark.parametrize("code", [2, 719])
def test_a_hip_call_that_fails_is_named(device: SimulatedDevice, call: str, code: int) -> None:
    x, y, out = operands()
    scaled_add(device, x, y, out, 1.0)
    out.fill_(float("nan"))
    named = f"HIP error {code} .*{call} returned hipError"
    with pytest.raises(LaunchError, match=named) as caught, device.failing(call, code):
        scaled_add(device, x, y, out, 1.0)
    assert isinstance(caught.value.__cause__, HipCallError)
    assert caught.value.__cause__.call == call
    assert caught.value.code == code
    assert out.isnan().all(), "nothing ran"
    scaled_add(device, x, y, out, 1.0)
    assert torch.equal(out, x + y)


def test_a_failure_that_was_not_tried_is_an_error(device: SimulatedDevice) -> None:
    with (
        pytest.raises(RuntimeError, match="hipStreamCreate was not called"),
        device.failing("hipStreamCreate"),
    ):
        pass
    with pytest.raises(ValueError, match="not a function of the stand-in"), device.failing("hipNoSuchCall"):
        pass


def test_an_interrupt_passes_through(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_launch: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "run", interrupted)
    x, y, out = operands()
    with pytest.raises(KeyboardInterrupt):
        scaled_add(device, x, y, out, 1.0)


def test_an_error_outside_of_the_guard_is_not_blamed_on_the_next_launch(device: SimulatedDevice) -> None:
    x, y, out = operands()
    addresses = (x.data_ptr(), y.data_ptr(), out.data_ptr())
    with device.failing("hipModuleLaunchKernel"):
        launch_unguarded(*addresses, 1.0, N)
    with pytest.raises(LaunchError, match="left by an earlier launch"):
        scaled_add(device, x, y, out, 1.0)
    scaled_add(device, x, y, out, 1.0)
    assert torch.equal(out, x + y)


def test_no_disassembler(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_object, "_candidates", lambda: iter(()))
    with pytest.raises(DeviceUnavailableError, match="no disassembler for gfx950 was found; pip install"):
        SimulatedDevice().prepare()


@pytest.fixture(scope="module")
def image(device: SimulatedDevice) -> bytes:
    """The code object that FlyDSL launched."""
    x, y, out = operands()
    scaled_add(device, x, y, out, 1.0)
    return device.launches[-1].image


def test_code_object(image: bytes) -> None:
    loaded = code_object.parse(image)
    kernel = loaded.kernels["scaled_add"]
    assert loaded.target.endswith("gfx950")
    assert kernel.required_block == (THREADS, 1, 1)
    assert [argument.offset for argument in kernel.metadata.arguments] == [0, 8, 16, 24, 28]
    assert kernel.metadata.kernarg_bytes == 32
    assert kernel.metadata.notes["vgpr_spill_count"] == 0
    assert len(kernel.code) % 4 == 0


def test_a_damaged_code_object_is_refused(image: bytes) -> None:
    """However it is cut or changed: read, or refused by name."""
    generator = torch.Generator().manual_seed(0)
    for size in torch.randint(len(image), (100,), generator=generator).tolist():
        with pytest.raises(ValueError, match=r"code object|ELF|MessagePack"):
            code_object.parse(image[:size])
    for at in torch.randint(len(image), (300,), generator=generator).tolist():
        damaged = bytearray(image)
        damaged[at] ^= 0xFF
        with contextlib.suppress(ValueError, UnsupportedInstructionError):
            code_object.parse(bytes(damaged))


def test_a_disassembler_that_fails_gives_way_to_the_next(
    image: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = code_object.parse(image)
    kernel = loaded.kernels["scaled_add"]
    whole = code_object.listing(loaded, kernel)
    broken = code_object.Disassembler(
        "broken", functools.partial(code_object._by_library, str(tmp_path / "no-library.so"))
    )
    working = next(code_object._candidates())
    monkeypatch.setattr(code_object, "_candidates", lambda: iter((broken, working)))
    assert code_object.listing(loaded, kernel) == whole
    monkeypatch.setattr(code_object, "_candidates", lambda: iter((broken,)))
    with pytest.raises(DeviceUnavailableError, match=r"scaled_add cannot be disassembled: .*no-library\.so"):
        code_object.listing(loaded, kernel)


def test_every_disassembler_here_says_the_same(image: bytes) -> None:
    loaded = code_object.parse(image)
    kernel = loaded.kernels["scaled_add"]
    candidates = list(code_object._candidates())
    assert candidates
    listings = {candidate.source: candidate.decode(loaded, kernel) for candidate in candidates}
    first = next(iter(listings.values()))
    assert first[0][0] == 0
    assert first[-1][1] == "s_endpgm"
    for source, rows in listings.items():
        assert rows == first, source
