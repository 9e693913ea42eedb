"""The blocks of README and the guides are run as they stand, in order, by someone who has only the clone.

Only the address of the sidecar is another one: its line is run with a port that the system picks.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer import Recorder
from indexer.case import read_case
from tests.support.cases import ROOT
from tests.support.live_server import LiveServer
from tests.support.process import ForkedProcess, call, spawn

PAGES = ("README.md", "docs/scaling.md", "docs/sidecar.md")
"""Run as one program, in this order."""
README = "\n".join((ROOT / page).read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
RUN_BY_THIS_SUITE = ("make test",)  # it is what runs this test
COMMAND = ".venv/bin/nvfp4-indexer"
TORCHRUN = ".venv/bin/torchrun"
NIGHTLY = (f"{COMMAND} kernel report", f"{COMMAND} kernel compile", TORCHRUN)
"""Lines that compile every kernel, and torchrun's.

By day tests/gfx950/test_report_kernels.py runs the first on a kernel of each family, test_toolchain.py the
second on one, and two forks run torchrun's program.
"""
SERVE = f"{COMMAND} serve"
STARTED = (f"{COMMAND} doctor", f"{COMMAND} bench")
"""Commands that start Python, one here and one of the sidecar's; the others are forks."""
URL = "http://127.0.0.1:8421"


def _console_lines() -> list[str]:
    text = "\n".join(text for language, text in BLOCKS if language == "console")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and line not in RUN_BY_THIS_SUITE))


def _file_of(block: str) -> str | None:
    """The name of the file that a block is a whole program for: its first line says so."""
    found = re.match(r"# (\w+\.py)\n", block)
    return found[1] if found else None


@pytest.fixture(scope="module")
def sidecar() -> Iterator[LiveServer]:
    """The server that README starts."""
    (line,) = (line for line in _console_lines() if line.startswith(SERVE))
    with LiveServer(*shlex.split(line.removeprefix(SERVE)), module="client.cli serve") as server:
        yield server


def test_pages_have_only_blocks_that_are_run() -> None:
    assert {language for language, _ in BLOCKS} - {"text", "yaml"} == {"console", "python"}
    assert _console_lines()
    assert URL in README


def test_python_blocks_run_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sidecar: LiveServer
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = [text for language, text in BLOCKS if language == "python" and not _file_of(text)]
    program = "\n".join(blocks).replace(URL, sidecar.url)
    namespace: dict[str, object] = {}
    exec(compile(program, "README and guides", "exec"), namespace)  # noqa: S102 - the point of the test

    printed = capsys.readouterr().out
    assert "k[0, 0] = nan" in printed, "the refusal README shows must name the argument and the value"
    for name in ("out", "reply"):
        scores, block_ids = namespace[name].scores, namespace[name].block_ids  # type: ignore[attr-defined]
        assert tuple(scores.shape) == (4, 64, 40)
        assert tuple(block_ids.shape) == (4, 64, 16)
    assert namespace["length"] == 5000
    assert namespace["recorded"].block_ids.shape == (2, 256, 16)  # type: ignore[attr-defined]
    assert namespace["profile"].repeats == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.nightly if line.startswith(NIGHTLY) else ())
        for line in _console_lines()
        if not line.startswith(SERVE)
    ],
)
def test_console_line_runs(line: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if URL in line:
        sidecar: LiveServer = request.getfixturevalue("sidecar")
        line = line.replace(URL, sidecar.url)
    if line.startswith("make demo"):
        line = f"{COMMAND} demo"  # what that target runs once the environment is there
    program = shlex.split(line)[0]
    for block in (text for _, text in BLOCKS):
        if name := _file_of(block):
            (tmp_path / name).write_text(block)
            line = line.replace(name, str(tmp_path / name))
    assert program in (COMMAND, TORCHRUN, "curl"), f"this test does not know how to run: {line}"
    if program == "curl" and shutil.which(program) is None:
        pytest.skip("curl is not installed")
    words = [
        word
        for pattern in shlex.split(line)[1:]
        for word in (sorted(str(path) for path in ROOT.glob(pattern)) if "*" in pattern else [pattern])
    ]
    files = [tmp_path / word for word in words if word.startswith("out/")]
    words = [str(tmp_path / word) if word.startswith("out/") else word for word in words]
    if "demo" in words:
        words += ["--picture", str(tmp_path / "demo.png")]
    if program == COMMAND and not line.startswith(STARTED):
        done = spawn(*words)
    else:
        modules = {COMMAND: "client.cli", TORCHRUN: "torch.distributed.run"}
        command = [sys.executable, "-m", modules[program]] if program in modules else [program]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or files
    for file in files:
        assert file.stat().st_size
    if program == TORCHRUN:
        _assert_same_answers(done.stdout)


def _assert_same_answers(printed: str) -> None:
    # torchrun's workers do not buffer: a line's end can come after the other rank's line.
    lines = re.findall(r"rank (\d): (.+?) bytes sent", printed)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], printed
    assert len({answer for _, answer in lines}) == 1, printed


def test_the_program_of_two_ranks_runs(tmp_path: Path) -> None:
    """As torchrun starts it: a process for each rank, which the environment numbers."""
    (program,) = (text for _, text in BLOCKS if _file_of(text) == "ranks.py")
    path = tmp_path / "ranks.py"
    path.write_text(program)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    with (tmp_path / "printed").open("w+") as printed:
        ranks = [
            ForkedProcess.of_module(
                "tests.newcomer.run_file", [str(path)], {**shared, "RANK": rank}, printed, printed
            )
            for rank in ("0", "1")
        ]
        codes = [rank.wait(120) for rank in ranks]
        text = (tmp_path / "printed").read_text()
    assert codes == [0, 0], text
    _assert_same_answers(text)


# The blocks of docs/capture.md: the torch loop runs as it stands, the engines' calls fit the signature.

PAGE_BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/capture.md").read_text(), re.MULTILINE | re.DOTALL
)
CALLS = [
    node
    for block in PAGE_BLOCKS
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("recorder.capture")
]
(LOOP,) = (block for block in PAGE_BLOCKS if "append_keys" in block)


def test_the_torch_loop_writes_a_capture_that_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no folder "out" is
    exec(compile(LOOP, "docs/capture.md", "exec"), {})  # noqa: S102 - the point of the test
    (path,) = tmp_path.rglob("*.safetensors")
    case = read_case(path)
    assert case.engine is not None
    assert case.engine.block_ids is not None
    result = call("verify", path, "--backend", "cpu")
    assert result.exit_code == 0, result.stdout
    assert "engine" in result.stdout


def test_engines_call_it_as_it_can_be_called() -> None:
    assert len(CALLS) == 3, "the sketch, vLLM, SGLang"
    signature = inspect.signature(Recorder.capture)
    for node in CALLS:
        keywords = {str(word.arg): None for word in node.keywords}
        signature.bind(None, *node.args, **keywords)
