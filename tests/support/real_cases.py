"""Case files of real activations: those of the clone, and more where there are more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
CODE = DATA / "code_8k_l20.safetensors"
CUT = DATA / "ragged_l15_cut.safetensors"
MORE = Path(os.environ.get("NVFP4_INDEXER_CASES", ROOT.parent / "shared" / "cases"))
"""A folder that a clone need not have; named by an environment variable, else beside the clone."""


def more_case(name: str) -> Path:
    """A case file that the clone does not hold; skips the test, saying why, if it is not there."""
    path = MORE / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} is not there: set NVFP4_INDEXER_CASES to the folder that has it")
    return path
