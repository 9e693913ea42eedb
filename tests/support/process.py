"""Python in processes of its own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from client.cli import app
from indexer.case import read_case, write_case
from tests.support.cases import CUT, ROOT


def python(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's root, with further environment variables."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def printed_by(*words: str | Path, **environment: str) -> str:
    """What :func:`python` printed; fail unless it ended well."""
    done = python(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The command, run in this process or in one of its own.

VERIFY_KEYS = [
    "case",
    "backend",
    "ok",
    "rows",
    "max_score_error",
    "score_tolerance",
    "topk_mismatches",
    "seconds",
    "unjudged_rows",
    "not_finite",
    "engine",
]
"""Of one line of ``verify --json``, in order."""


def call(*words: str | Path) -> Result:
    """Run the command in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def spawn(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return python("-m", "client.cli", *words, **environment)


def wrong_expectation(folder: Path) -> Path:
    """A case whose expected ids are not the right selection, in one row."""
    case = read_case(CUT)
    assert case.expected_block_ids is not None
    ids = case.expected_block_ids.copy()
    ids[0, 0] = ids[0, 0, ::-1]
    path = folder / "wrong.safetensors"
    write_case(dataclasses.replace(case, expected_block_ids=ids), path)
    return path
