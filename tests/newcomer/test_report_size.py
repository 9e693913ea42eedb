"""A report stays small enough to be mailed, whatever the call."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from client.plots import MAX_BLOCKS, MAX_QUERIES, ScoreMap, draw_score_map
from client.report.page import picture
from tests.support.command import call

MAX_PAGE_BYTES = 2_000_000
"""Of a report; docs/profile.md says so."""


@pytest.mark.nightly
def test_the_worst_map_leaves_room_for_the_rest() -> None:
    """Noise, which no picture can be smaller than: every cell and every outline differs from the next."""
    random = np.random.default_rng(0)
    shape = (MAX_QUERIES, MAX_BLOCKS)
    noise = ScoreMap(
        request=0,
        head=0,
        positions=np.arange(MAX_QUERIES),
        queries=65536,
        first_block=8192 - MAX_BLOCKS,
        scores=random.standard_normal(shape).astype(np.float32),
        selected=random.random(shape) < 0.5,
        picked=random.integers(0, 65536, MAX_BLOCKS),
        picked_forced=np.zeros(MAX_BLOCKS, dtype=np.int64),
        topk=64,
    )
    assert len(picture(draw_score_map(noise, "request 0"), "")) < 0.75 * MAX_PAGE_BYTES


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_million_tokens_of_four_heads(tmp_path: Path) -> None:
    case, out = tmp_path / "c.safetensors", tmp_path / "r.html"
    made = call("case", "make", "m3", "--context", "1048576", "--queries", "128", "--out", case)
    assert made.exit_code == 0, made.stderr
    result = call("report", case, "--backend", "cpu", "--repeats", "1", "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["bytes"] == out.stat().st_size < MAX_PAGE_BYTES
