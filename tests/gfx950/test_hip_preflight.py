"""What ends a process at FlyDSL's first launch is an exception at preflight; in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.errors import DeviceUnavailableError
from kernel.gfx950.hip import SimulatedDevice, standin
from tests.support.real_cases import ROOT

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
