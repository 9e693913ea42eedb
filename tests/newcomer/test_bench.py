"""The bench command: what it prints, and its JSON."""

from __future__ import annotations

import json

import pytest

from tests.support.command import call

SMALL = ("--queries", "40", "--keys", "700", "--heads", "2", "--rounds", "2", "--backend", "cpu")


def test_prints_both_times() -> None:
    """Selection alone and scores with top-k, with their rate."""
    result = call("bench", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "cpu (exact)" in result.stdout
    assert "select:" in result.stdout
    assert "score + top-k:" in result.stdout


def test_json_counts_the_visible_blocks() -> None:
    """TFLOP/s times ms is the FLOP of the blocks that the 40 last rows see."""
    result = call("bench", *SMALL, "--json")
    report = json.loads(result.stdout)
    blocks = 2 * sum(position // 128 + 1 for position in range(660, 700))
    for measured in report["measured"].values():
        flop = measured["tflops"] * 1e12 * measured["ms"] / 1e3
        assert flop == pytest.approx(2 * 128 * 128 * blocks)


def test_more_queries_than_keys_are_one_line() -> None:
    """An impossible shape names the argument at fault."""
    result = call("bench", "--queries", "9", "--keys", "5", "--rounds", "1", "--backend", "cpu")
    assert result.exit_code == 2
    assert "seq_lens[0] = 5" in result.stderr
