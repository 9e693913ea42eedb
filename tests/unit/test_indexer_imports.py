"""What importing the package loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import indexer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["indexer", "indexer.case", "kernel.errors", "kernel.contract"])
def test_reading_a_case_file_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert set(indexer.__all__) <= set(dir(indexer))
    for name in indexer.__all__:
        assert getattr(indexer, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Scorer'"):
        indexer.Scorer  # noqa: B018
