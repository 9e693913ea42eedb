"""Case files of real activations: those of the clone, and more where there are more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from indexer.case import Case, encode_case

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


# Small cases, and case files written byte by byte so that any rule can be broken.

BLOCK_TOKENS = 128


def small_case(seed: int = 0, **changes: Any) -> Case:
    """Two requests, (keys, queries) (130, 3) and (5, 2), two heads."""
    generator = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "index_q": generator.normal(size=(5, 2, 128)).astype(ml_dtypes.bfloat16),
        "index_k": generator.normal(size=(135, 128)).astype(ml_dtypes.bfloat16),
        "cu_seqlens_q": np.array([0, 3, 5], dtype=np.int32),
        "seq_lens": np.array([130, 5], dtype=np.int32),
        "source": "small",
    }
    return Case(**{**fields, **changes})


def paged_case(seed: int = 0, **changes: Any) -> Case:
    """The lengths of :func:`small_case` over pages of random bytes; the unused column of the table is -1."""
    generator = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "index_k": None,
        "pages": generator.integers(0, 256, size=(4, 9216), dtype=np.uint8),
        "block_table": np.array([[3, 1], [0, -1]], dtype=np.int32),
    }
    return small_case(seed, **{**fields, **changes})


def split(body: bytes) -> tuple[dict[str, Any], bytes]:
    """A container's header and the bytes after it."""
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + length]), body[8 + length :]


def join(header: Mapping[str, Any] | bytes, tail: bytes) -> bytes:
    """A container from a header, as JSON or as bytes, and the bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tail


def small_parts() -> tuple[dict[str, Any], bytes]:
    """Header and tail of a valid small case."""
    return split(encode_case(small_case()))


def edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A valid small case after a change of its header."""
    header, tail = small_parts()
    change(header)
    return join(header, tail)
