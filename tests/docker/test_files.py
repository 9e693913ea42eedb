"""What the Dockerfiles, compose.yaml and .dockerignore say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernel.backends.flydsl.kernel_library import FILE_NAME, VARIABLE
from server.serve import _url
from server.settings import Settings
from tests.support.cases import ROOT
from tests.support.dockerfile import (
    IMAGE_FOLDER,
    Instruction,
    environment_of,
    exec_form,
    ignore_patterns,
    ignored,
    instructions,
    last,
)
from tests.support.live_server import LiveServer
from tests.support.process import spawn

FOLDER = ROOT / "docker"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))
GFX950 = FOLDER / "Dockerfile.gfx950"
HEALTHCHECK = FOLDER / "healthcheck.py"


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def found(request: pytest.FixtureRequest) -> list[Instruction]:
    """The instructions of one of the Dockerfiles."""
    path: Path = request.param
    return instructions(path)


def variables(found: list[Instruction]) -> dict[str, str]:
    """Every variable that a Dockerfile sets."""
    values = [environment_of(instruction.value) for instruction in found if instruction.keyword == "ENV"]
    return {name: text for value in values for name, text in value.items()}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: its package has binaries for Linux on x86_64 only")
    done = subprocess.run([linter, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""


def test_bases_are_pinned() -> None:
    """A stage's base is an image with a version, or a stage before it."""
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.gfx950"]
    for path in DOCKERFILES:
        stages: set[str] = set()
        for value in (step.value for step in instructions(path) if step.keyword == "FROM"):
            base, _, stage = value.partition(" AS ")
            name, _, tag = base.partition(":")
            if base not in stages:
                assert name in ("python", "rocm/pytorch")
                assert any(part.isdigit() for part in tag.replace("_", ".").split("."))
                assert "latest" not in tag
            stages.add(stage)
    assert ":rocm7." in instructions(GFX950)[0].value, "FlyDSL 0.5.0 needs HIP 7"


def test_the_server_runs_as_nobody_in_particular_and_is_watched(found: list[Instruction]) -> None:
    keywords = [instruction.keyword for instruction in found]
    user = last(found, "USER")
    assert user.isdigit()
    assert int(user) >= 1000
    assert f"--uid {user} " in " ".join(step.value for step in found if step.keyword == "RUN")
    assert exec_form(last(found, "ENTRYPOINT")) == ["nvfp4-indexer", "serve"]
    _, _, command = last(found, "HEALTHCHECK").partition("CMD ")
    assert exec_form(command) == ["python3", f"{IMAGE_FOLDER}/docker/healthcheck.py"]
    assert last(found, "EXPOSE") == variables(found)["NVFP4_INDEXER_PORT"]
    assert keywords.index("USER") < keywords.index("ENTRYPOINT")


def test_gfx950_users_reach_the_device_and_kernels_are_in_a_library() -> None:
    """Of the stage that makes it only the library gets into the image, whose variable names it."""
    found = instructions(GFX950)
    assert any("--groups video,render" in step.value for step in found if step.keyword == "RUN")
    places = [place for place, step in enumerate(found) if step.keyword == "FROM"]
    making, image = found[places[1] : places[2]], found[places[2] :]
    exporting = [step.value for step in making if step.keyword == "RUN"]
    assert len(exporting) == 1
    folder = f"{IMAGE_FOLDER}/kernels"
    assert exporting[0].endswith(f"nvfp4-indexer kernel export --out {folder}")
    copied = [step.value for step in image if step.keyword in ("COPY", "RUN")]
    assert copied == [f"--from=exported {folder}/{FILE_NAME} kernels/"]
    assert variables(image)[VARIABLE] == f"{folder}/{FILE_NAME}"


def test_a_container_serves_only_with_a_token(
    found: list[Instruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(found).items():
        if name != "NVFP4_INDEXER_BACKEND":  # that of gfx950 is not known on every branch of the registry
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="no token protects it"):
        Settings()
    monkeypatch.setenv("NVFP4_INDEXER_TOKENS", "0123456789abcdef")
    assert Settings().host == "0.0.0.0"  # noqa: S104 - what the image says


def test_every_variable_is_a_setting(found: list[Instruction]) -> None:
    prefix = "NVFP4_INDEXER_"
    names = {name for name in variables(found) if name.startswith(prefix)}
    for service in compose()["services"].values():
        names |= service["environment"].keys()
    names -= {VARIABLE}  # the backend reads it
    assert {name.removeprefix(prefix).lower() for name in names} <= Settings.model_fields.keys()


def test_images_get_what_the_wheel_needs_and_nothing_else() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git clone: what belongs to the repository is not known")
    files = listing.stdout.splitlines()
    patterns = ignore_patterns(ROOT)
    let_in = {file for file in files if not ignored(patterns, file)}
    rooms = ("kernel/", "indexer/", "server/", "client/")
    assert {file for file in files if file.startswith(rooms)} <= let_in
    others = {file for file in let_in if not file.startswith(rooms)}
    assert others == {
        "pyproject.toml",
        "requirements.lock",
        "README.md",
        "LICENSE",
        "docker/healthcheck.py",
        "tests/data/code_8k_l20.safetensors",
    }
    for file in (".git/config", ".venv/bin/python", "kernel/__pycache__/page.pyc", "tokens", "docker/tokens"):
        assert ignored(patterns, file), file


def compose() -> dict[str, Any]:
    """compose.yaml as Compose reads it."""
    content = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert isinstance(content, dict)
    return content


def test_compose_gives_the_gpu_and_no_more() -> None:
    services = compose()["services"]
    gpu = services["gfx950"]
    assert gpu["devices"] == ["/dev/kfd", "/dev/dri"]
    assert len(gpu["group_add"]) == 2
    assert all(group.startswith("${") and group.split(":-")[1][:-1].isdigit() for group in gpu["group_add"])
    assert gpu["shm_size"]
    for name, service in services.items():
        assert service["ports"] == ["127.0.0.1:8421:8421"]
        assert service["cap_drop"] == ["ALL"]
        assert "privileged" not in service
        assert service["environment"]["NVFP4_INDEXER_TOKENS"].startswith("${NVFP4_INDEXER_TOKENS:?")
        assert (FOLDER / service["build"]["context"]).resolve() == ROOT
        dockerfile = ROOT / service["build"]["dockerfile"]
        assert dockerfile.name == f"Dockerfile.{name}"
        assert service["healthcheck"]["test"][1:] == exec_form(
            last(instructions(dockerfile), "HEALTHCHECK").partition("CMD ")[2]
        )
        drain = Settings.model_fields["drain_seconds"].default
        assert int(service["stop_grace_period"].removesuffix("s")) > drain
    assert "devices" not in services["cpu"]


def test_the_health_check_tells_ready_from_not(tmp_path: Path) -> None:
    file = tmp_path / "url"

    def check(**environment: str) -> subprocess.CompletedProcess[str]:
        environment = {"http_proxy": "http://127.0.0.1:9", **environment}
        return subprocess.run(
            [sys.executable, "-I", HEALTHCHECK], env=environment, capture_output=True, text=True, check=False
        )

    url_file = {"NVFP4_INDEXER_URL_FILE": str(file)}
    assert check(**url_file).returncode == 1, "nothing was started yet"
    tokens = {"NVFP4_INDEXER_TOKENS": "0123456789abcdef"}
    # Flags come before the image's variables: the port is another one than the image says.
    environment = {**tokens, **url_file, "NVFP4_INDEXER_PORT": "8421", "NVFP4_INDEXER_HOST": "127.0.0.3"}
    flags = ("--backend=cpu", "--num-pages=8", "--host=127.0.0.1")
    with LiveServer(*flags, environment=environment, forked=True) as server:
        assert file.read_text() == f"{server.url}\n"
        ready = check(**url_file)
        assert ready.returncode == 0, ready.stdout
        assert check().returncode == 1, "without the image's variable nothing is known"
    gone = check(**url_file)
    assert gone.returncode == 1
    assert "refused" in gone.stdout
    file.write_text("nonsense")
    assert check(**url_file).returncode == 1


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:5"),  # noqa: S104 - not bound
        ("127.0.0.3", "http://127.0.0.3:5"),
        ("::", "http://[::1]:5"),
        ("::1", "http://[::1]:5"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert _url(host, 5) == url


def test_a_url_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "none" / "url"
    done = spawn("serve", "--port=0", "--backend=cpu", f"--url-file={file}")
    assert done.returncode == 1
    assert f"url_file = {file}: No such file" in done.stderr


def test_the_image_tells_server_and_health_check_the_same_file(found: list[Instruction]) -> None:
    assert Path(variables(found)["NVFP4_INDEXER_URL_FILE"]).parent == Path("/tmp")  # noqa: S108 - the image's
