"""The images' install and compile steps, taken from the Dockerfiles and executed in clean environments."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from kernel.backends.flydsl import geometry, kernel_library
from kernel.gfx950.hip import code_object
from tests.support.cases import ROOT
from tests.support.dockerfile import Build, base_environment, exec_form, instructions, last
from tests.support.score_program import SCORE

FOLDER = ROOT / "docker"
INDEX = os.environ.get("NVFP4_INDEXER_TORCH_INDEX_URL")
"""Index of CPU builds of torch, if not the Dockerfile's own."""
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def python_with(folder: Path, *packages: str) -> Path:
    """A fresh environment's interpreter, some packages installed."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python3"
    if packages:
        arguments = ["--extra-index-url", INDEX] if INDEX else []
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments, *packages], check=True)
    return python


def ask(build: Build, program: str) -> str:
    """What a program prints in the environment that a build left, away from the sources."""
    done = subprocess.run(
        ["python3", "-c", program], env=build.environment, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def versions(build: Build) -> str:
    """Versions in an environment, as its own metadata has them."""
    return ask(
        build,
        "from importlib.metadata import distributions as d; "
        "print(sorted((x.name, x.version) for x in d() if x.name.startswith(('torch', 'triton'))))",
    )


def test_cpu_image(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    python = python_with(tmp_path / "base")
    arguments = {"TORCH_INDEX_URL": INDEX} if INDEX else {}
    build = Build(FOLDER / "Dockerfile.cpu", ROOT, image, base_environment(python), arguments)
    build.run()
    assert len(build.steps) == 1
    locked = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if "torch==" in line]
    assert versions(build).startswith(f"[('torch', '{locked[0].removeprefix('torch==')}")
    assert ask(build, "import torch; print(torch.version.cuda)") == "None"
    _image_works(build, tmp_path, FOLDER / "Dockerfile.cpu")


def test_gfx950_image_keeps_its_torch(tmp_path: Path) -> None:
    # The base's torch is not to be had here: packages of its names and versions stand for it, then the torch
    # of this environment, with which the result is used. ROCm's linker is not there either: another LLD is.
    image = tmp_path / "image"
    image.mkdir()
    rocm = python_with(tmp_path / "rocm", *(str(wheel) for wheel in _rocm_wheels(tmp_path)))
    build = Build(FOLDER / "Dockerfile.gfx950", ROOT, image, base_environment(rocm), {})
    before = versions(build)
    assert "2.10.0+rocm7.2.4.git0123abcd" in before
    build.run(only="pip install")
    assert versions(build) == before

    shutil.rmtree(image)
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    simulator = [line for line in locked if line.startswith(("ziglang==", "rocm-llvm-python=="))]
    python = python_with(tmp_path / "base", f"torch=={metadata.version('torch')}", *simulator)
    build = Build(FOLDER / "Dockerfile.gfx950", ROOT, image, base_environment(python), {})
    before = versions(build)
    build.run()
    assert len(build.steps) == 2
    assert versions(build) == before
    _image_works(build, tmp_path, FOLDER / "Dockerfile.gfx950")
    _library_works(build, image)


def _rocm_wheels(folder: Path) -> list[Path]:
    """Empty wheels of the base image's torch and of what it is pinned to."""
    wheels = []
    requirement = "Requires-Dist: triton==3.6.0+rocm7.2.4.git0123abcd\n"
    for name, version, more in (
        ("torch", "2.10.0+rocm7.2.4.git0123abcd", requirement),
        ("triton", "3.6.0+rocm7.2.4.git0123abcd", ""),
    ):
        info = f"{name}-{version}.dist-info"
        files = {
            f"{name}/__init__.py": "",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
        wheels.append(folder / f"{name}-{version}-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    return wheels


def test_gfx950_image_without_a_torch_is_not_built(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    python = python_with(tmp_path / "base")
    build = Build(FOLDER / "Dockerfile.gfx950", ROOT, image, base_environment(python), {})
    with pytest.raises(AssertionError, match="exit code"):
        build.run(only="pip install")
    assert ask(build, "import importlib.util as u; print(u.find_spec('torch'))") == "None"


def test_gfx950_kernels_are_exported_into_the_image(tmp_path: Path) -> None:
    """The stage's step alone, in this environment: it leaves the library in the image, and nothing else."""
    image = tmp_path / "image"
    image.mkdir()
    command = tmp_path / "bin" / "nvfp4-indexer"  # what the step before this one installs
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m client.cli "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{command.parent}:{os.environ['PATH']}"}
    build = Build(FOLDER / "Dockerfile.gfx950", ROOT, image, environment, {})
    build.run(only="kernel export")
    assert len(build.steps) == 1
    assert list((image / "kernels").iterdir()) == [image / "kernels" / kernel_library.FILE_NAME]
    assert not (image / "compiled").exists()
    _holds_every_kernel(Path(build.environment[kernel_library.VARIABLE]))


def _holds_every_kernel(library: Path) -> None:
    """As its manifest says, and as machine code for gfx950."""
    assert list(kernel_library.check(library).kernels) == sorted(geometry.kernel_names())
    whole = library.read_bytes()
    magic = b"\x7fELF\x02\x01\x01\x40"  # of AMD's code objects; the library's own last byte is another one
    targets: set[str] = set()
    kernels: set[str] = set()
    place = whole.find(magic)
    while place >= 0:
        found = code_object.parse(whole[place:])
        targets.add(found.target.rpartition("-")[2])
        kernels |= found.kernels.keys()
        place = whole.find(magic, place + 1)
    assert targets == {"gfx950"}
    assert kernels == set(geometry.kernel_names())


def _library_works(build: Build, image: Path) -> None:
    """The image's library is all that is needed to score: FlyDSL is taken out of the environment."""
    library = Path(build.environment[kernel_library.VARIABLE])
    assert library == image / "kernels" / kernel_library.FILE_NAME
    _holds_every_kernel(library)
    command = ["python3", "-m", "pip", "uninstall", "--quiet", "--yes", "flydsl"]
    subprocess.run(command, env=build.environment, cwd="/", check=True)
    assert ask(build, "import importlib.util as u; print(u.find_spec('flydsl'))") == "None"
    assert ask(build, SCORE).splitlines()[-1] == "[]"


def _image_works(build: Build, tmp_path: Path, path: Path) -> None:
    """What was installed, not the sources beside it, verifies a case and serves by the entry point."""
    where = ask(build, "import server; print(server.__file__)")
    assert where.startswith(str(tmp_path / "base"))
    environment = {**build.environment, "NVFP4_INDEXER_BACKEND": "cpu", "NVFP4_INDEXER_PORT": "0"}
    environment["NVFP4_INDEXER_URL_FILE"] = str(tmp_path / "url")
    case = tmp_path / "image" / "tests" / "data" / "code_8k_l20.safetensors"
    verify = ["nvfp4-indexer", "verify", str(case), "--backend", "cpu"]
    done = subprocess.run(verify, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    entry_point = exec_form(last(instructions(path), "ENTRYPOINT"))
    done = subprocess.run(entry_point, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "token" in done.stderr
    environment["NVFP4_INDEXER_TOKENS"] = "0123456789abcdef"
    environment["NVFP4_INDEXER_HOST"] = "127.0.0.1"  # a test is reachable from this machine only
    with subprocess.Popen(
        entry_point, env=environment, cwd="/", stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        events = (json.loads(line) for line in process.stderr if line.startswith("{"))
        assert any(event["event"] == "ready" for event in events)
        check = ["python3", str(tmp_path / "image" / "docker" / "healthcheck.py")]
        assert subprocess.run(check, env=environment, cwd="/", check=False).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
