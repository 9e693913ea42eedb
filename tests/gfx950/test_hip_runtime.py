"""What ends a process at FlyDSL's first launch is an exception at preflight; in processes of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel.errors import DeviceUnavailableError
from kernel.gfx950.hip import SimulatedDevice, standin
from tests.support.cases import ROOT
from tests.support.process import printed_by

PROGRAM = """
import ctypes, sys
from kernel.backends.flydsl.runtime import preflight
from kernel.errors import DeviceUnavailableError

class Device:
    def prepare(self):
        for path in sys.argv[1:]:
            ctypes.CDLL(path)

try:
    preflight(Device())
except DeviceUnavailableError as error:
    print(error)
else:
    print("passed")
"""


def run(program: str, *arguments: str, **environment: str) -> str:
    """Standard output of a Python program that must end well; nothing of ROCm can be found by it."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    message = run(PROGRAM)
    assert "libfly_jit_runtime.so does not load: libamdhip64.so.7" in message
    assert "install ROCm 7" in message


def test_wrong_version(tmp_path: Path) -> None:
    message = run(PROGRAM, library_of(tmp_path, hip_functions(), "hip_9.9"))
    assert "version `hip_4.2' not found" in message


def test_missing_function(tmp_path: Path) -> None:
    library = library_of(tmp_path, hip_functions() - {"hipModuleLaunchKernel"}, "hip_4.2")
    message = run(PROGRAM, library)
    assert "hipModuleLaunchKernel" in message
    assert "does not load" in message


def test_the_stand_in_passes() -> None:
    assert run(PROGRAM, str(standin.library())) == "passed\n"


def test_compile_only_makes_every_launch_do_nothing() -> None:
    message = run(PROGRAM, str(standin.library()), COMPILE_ONLY="1")
    assert message == "COMPILE_ONLY=1 makes every launch do nothing; unset COMPILE_ONLY\n"


def test_the_simulated_device_refuses_a_process_with_a_real_hip(tmp_path: Path) -> None:
    """It would not replace the loaded one, and launches would go to a GPU."""
    real = library_of(tmp_path, hip_functions(), "hip_4.2")
    program = """
import ctypes, sys
real = ctypes.CDLL(sys.argv[1])
from kernel.errors import DeviceUnavailableError
from kernel.gfx950.hip import simulated_device
try:
    simulated_device().prepare()
except DeviceUnavailableError as error:
    print(error)
"""
    message = run(program, real, XDG_CACHE_HOME=str(tmp_path))
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
from kernel.errors import LaunchError
from kernel.gfx950.hip import simulated_device
from tests.gfx950.scaled_add import prepare, scaled_add

device = simulated_device()
prepare(device)
x, out = torch.ones(4), torch.zeros(4)
before = device.calls()
messages = []
try:
    with device.failing("hipModuleLoadData", 209):
        scaled_add(device, x, x, out, 1.0)
except LaunchError as error:
    messages.append(str(error))
made = sorted(set(device.calls()) - set(before))
try:
    scaled_add(device, x, x, out, 1.0)
except LaunchError as error:
    messages.append(str(error))
print(json.dumps({"messages": messages, "calls": made, "out": out.tolist()}))
"""

CALLS = """
import json
import torch
from kernel.gfx950.hip import simulated_device
from tests.gfx950.scaled_add import prepare, scaled_add

device = simulated_device()
prepare(device)
x, out = torch.ones(4), torch.zeros(4)
scaled_add(device, x, x, out, 1.0)
first = device.calls()
scaled_add(device, x, x, out, 1.0)
second = {call: count - first.get(call, 0) for call, count in device.calls().items()}
print(json.dumps({"first": sorted(first), "second": sorted(call for call, count in second.items() if count)}))
"""


def run_module_load(program: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(printed_by("-c", program).splitlines()[-1])
    return result


def test_a_module_that_fails_to_load_is_an_error_now_and_later() -> None:
    result = run_module_load(MODULE_LOAD_PROGRAM)
    first, later = result["messages"]
    assert "hipModuleLoadData returned hipErrorNoBinaryForGpu (209)" in first
    assert "restart the process" in later
    assert result["out"] == [0.0] * 4


def test_the_calls_of_a_launch_are_those_whose_failure_is_tested() -> None:
    """If FlyDSL begins to make another call, its failure is to be tried as well."""
    result = run_module_load(CALLS)
    assert result["first"] == ["hipModuleGetFunction", "hipModuleLaunchKernel", "hipModuleLoadData"]
    assert result["second"] == ["hipModuleGetFunction", "hipModuleLaunchKernel"]
