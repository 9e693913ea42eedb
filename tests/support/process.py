"""Python in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.real_cases import ROOT


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
