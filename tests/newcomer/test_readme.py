"""README's blocks are run as they stand, in its order, by someone who has only the clone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
RUN_BY_THIS_SUITE = ("make test",)  # it is what runs this test
COMMAND = ".venv/bin/nvfp4-indexer"


def _console_lines() -> list[str]:
    text = "\n".join(text for language, text in BLOCKS if language == "console")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and line not in RUN_BY_THIS_SUITE]


def test_readme_has_only_blocks_that_are_run() -> None:
    assert {language for language, _ in BLOCKS} == {"console", "python"}
    assert _console_lines()


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(text for language, text in BLOCKS if language == "python")
    namespace: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), namespace)  # noqa: S102 - the point of the test

    printed = capsys.readouterr().out
    assert "k[0, 0] = nan" in printed, "the refusal README shows must name the argument and the value"
    scores, block_ids = namespace["out"].scores, namespace["out"].block_ids  # type: ignore[attr-defined]
    assert tuple(scores.shape) == (4, 64, 40)
    assert tuple(block_ids.shape) == (4, 64, 16)


@pytest.mark.parametrize("line", _console_lines())
def test_console_line_runs(line: str, tmp_path: Path) -> None:
    if line.startswith("make demo"):
        line = f"{COMMAND} demo"  # what that target runs once the environment is there
    assert line.startswith(COMMAND), f"this test does not know how to run: {line}"
    words = [
        word
        for pattern in shlex.split(line)[1:]
        for word in (sorted(str(path) for path in ROOT.glob(pattern)) if "*" in pattern else [pattern])
    ]
    words = [str(tmp_path / word) if word.startswith("out/") else word for word in words]
    if "demo" in words:
        words += ["--picture", str(tmp_path / "demo.png")]
    done = subprocess.run(
        [sys.executable, "-m", "client.cli", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
