"""What ends a process at FlyDSL's first launch is an exception at preflight; in processes of their own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from kernel.backends.flydsl.runtime import Device, preflight
from kernel.errors import DeviceUnavailableError
from kernel.gfx950.hip import SimulatedDevice, simulated_device, standin
from tests.support.process import ForkedProcess, forkserver, printed_by

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
"""In which nothing of ROCm is found."""


def message_of(task: Callable[..., str], *libraries: str, **variables: str) -> str:
    """What ``task`` returns in a process that has loaded no HIP."""
    receiver, sender = forkserver().Pipe(duplex=False)
    process = ForkedProcess(_send, sender, task, libraries, ENVIRONMENT | variables)
    sender.close()
    assert process.wait(120) == 0
    message: str = receiver.recv()
    return message


def _send(
    sender: Connection, task: Callable[..., str], libraries: Sequence[str], environment: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sender.send(task(*libraries))


def preflighted(*libraries: str) -> str:
    """What preflight says of a device that loads these libraries."""

    class Loading:
        def prepare(self) -> None:
            for path in libraries:
                ctypes.CDLL(path)

    try:
        preflight(cast("Device", Loading()))
    except DeviceUnavailableError as error:
        return str(error)
    return "passed"


def prepared_beside(real: str) -> str:
    """What the simulated device says where a HIP is loaded."""
    loaded = ctypes.CDLL(real)
    try:
        simulated_device().prepare()
    except DeviceUnavailableError as error:
        return str(error)
    return f"prepared beside {loaded}"


def library_of(folder: Path, functions: set[str], version: str) -> str:
    """A HIP library with these functions, which do nothing, under a symbol version."""
    source, versions, library = (folder / name for name in ("hip.c", "hip.map", standin.LIBRARY_NAME))
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(functions)))
    versions.write_text(f"{version} {{ global: hip*; local: *; }};\n")
    subprocess.run(
        [
            *standin.compiler(), "-shared", "-fPIC", f"-Wl,-soname,{standin.LIBRARY_NAME}",
            f"-Wl,--version-script={versions}", "-o", str(library), str(source),
        ],
        check=True,
    )  # fmt: skip
    return str(library)


def hip_functions() -> set[str]:
    """The functions that the stand-in offers under HIP's names."""
    return set(re.findall(r"^EXPORT [^(]*\b(hip\w+)\(", standin.SOURCE.read_text(), re.MULTILINE))


@pytest.mark.skipif(
    Path("/opt/rocm/lib", standin.LIBRARY_NAME).exists(),
    reason="a HIP is installed where FlyDSL looks for it",
)
def test_no_hip() -> None:
    message = message_of(preflighted)
    assert "libfly_jit_runtime.so does not load: libamdhip64.so.7" in message
    assert "install ROCm 7" in message


def test_wrong_version(tmp_path: Path) -> None:
    message = message_of(preflighted, library_of(tmp_path, hip_functions(), "hip_9.9"))
    assert "version `hip_4.2' not found" in message


def test_missing_function(tmp_path: Path) -> None:
    library = library_of(tmp_path, hip_functions() - {"hipModuleLaunchKernel"}, "hip_4.2")
    message = message_of(preflighted, library)
    assert "hipModuleLaunchKernel" in message
    assert "does not load" in message


def test_the_stand_in_passes() -> None:
    assert message_of(preflighted, str(standin.library())) == "passed"


def test_compile_only_makes_every_launch_do_nothing() -> None:
    message = message_of(preflighted, str(standin.library()), COMPILE_ONLY="1")
    assert message == "COMPILE_ONLY=1 makes every launch do nothing; unset COMPILE_ONLY"


def test_the_simulated_device_refuses_a_process_with_a_real_hip(tmp_path: Path) -> None:
    """It would not replace the loaded one, and launches would go to a GPU."""
    real = library_of(tmp_path, hip_functions(), "hip_4.2")
    message = message_of(prepared_beside, real, XDG_CACHE_HOME=str(tmp_path))
    assert message.startswith(f"{real} is loaded: a process has one HIP")


@pytest.mark.parametrize("variable", ["FLYDSL_GPU_ARCH", "ARCH"])
def test_the_simulated_device_refuses_another_architecture(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "gfx942")
    with pytest.raises(DeviceUnavailableError, match=f"{variable}=gfx942: .* is a gfx950; unset {variable}"):
        SimulatedDevice().prepare()


# ---- A module that fails to load: FlyDSL never tries again, so it is tried in a process of its own ----

MODULE_LOAD_PROGRAM = """
import json, sys
import torch
from kernel.backends.flydsl.launch import InsertLauncher
from kernel.errors import LaunchError
from kernel.gfx950.hip import simulated_device
from tests.gfx950.scaled_add import prepare, scaled_add

device = simulated_device()
prepare(device)
insert = InsertLauncher(device)
counts = []
for _ in range(3):
    counts.append(device.calls())
    insert(torch.ones(1, 128), torch.zeros(1, 9216, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
first, second = (
    sorted(name for name, count in after.items() if count > before.get(name, 0))
    for before, after in zip(counts, counts[1:])
)
x, out = torch.ones(4), torch.zeros(4)
messages = []
try:
    with device.failing("hipModuleLoadData", 209):
        scaled_add(device, x, x, out, 1.0)
except LaunchError as error:
    messages.append(str(error))
try:
    scaled_add(device, x, x, out, 1.0)
except LaunchError as error:
    messages.append(str(error))
print(json.dumps({"messages": messages, "first": first, "second": second, "out": out.tolist()}))
"""


@pytest.fixture(scope="module")
def module_load() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(printed_by("-c", MODULE_LOAD_PROGRAM).splitlines()[-1])
    return result


def test_a_module_that_fails_to_load_is_an_error_now_and_later(module_load: dict[str, Any]) -> None:
    first, later = module_load["messages"]
    assert "hipModuleLoadData returned hipErrorNoBinaryForGpu (209)" in first
    assert "restart the process" in later
    assert module_load["out"] == [0.0] * 4


def test_the_calls_of_a_launch_are_those_whose_failure_is_tested(module_load: dict[str, Any]) -> None:
    """If FlyDSL begins to make another call, its failure is to be tried as well."""
    assert module_load["first"] == ["hipModuleGetFunction", "hipModuleLaunchKernel", "hipModuleLoadData"]
    assert module_load["second"] == ["hipModuleGetFunction", "hipModuleLaunchKernel"]
