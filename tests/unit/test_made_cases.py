"""Made cases: the same bytes from the same seed, and what each kind promises, by the oracle."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from indexer.case import encode_case
from indexer.made_cases import KINDS, Shape, make_case
from indexer.oracle import run_oracle
from kernel.errors import InvalidArgumentError
from tests.support.process import printed_by

SMALL = Shape(context=2600, queries=5, heads=2, topk=4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(kind: str) -> None:
    first = encode_case(make_case(kind, SMALL, 7))
    assert encode_case(make_case(kind, SMALL, 7)) == first
    assert encode_case(make_case(kind, SMALL, 8)) != first


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_the_parts_that_numbers_are_made_in(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encode_case(make_case(kind, SMALL, 7))
    monkeypatch.setattr("indexer.made_cases.PART", 1280)
    assert encode_case(make_case(kind, SMALL, 7)) == whole


def test_a_large_case_takes_little_more_memory_than_its_numbers() -> None:
    program = (
        "import resource; from indexer.made_cases import *;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "case = make_case('m3', Shape(1 << 18, 1, 1), 0);"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "print((after - before) * 1024 / case.index_k.size)"
    )
    assert float(printed_by("-c", program)) < 10, (
        "bytes a value: 4 in fp32 and 2 in bf16, and what is made at a time"
    )


def test_bytes_do_not_depend_on_the_process_on_the_process_or_the_cores() -> None:
    program = (
        "import hashlib; from indexer.case import encode_case; from indexer.made_cases import *;"
        "print(hashlib.sha256(encode_case(make_case('m3', Shape(900, 3, 4), 5))).hexdigest());"
        "import sys; print('torch' in sys.modules)"
    )
    digest, torch = printed_by("-c", program).split()
    assert torch == "False"
    assert digest == hashlib.sha256(encode_case(make_case("m3", Shape(900, 3, 4), 5))).hexdigest()


def test_numbers_are_bell_shaped_with_unit_rms() -> None:
    keys = make_case("low-contrast", Shape(context=8192), 0).index_k
    assert keys is not None
    case = make_case("m3", Shape(context=128, queries=128, heads=4), 0)
    squares = np.square(case.index_q.astype(np.float64)).mean(axis=2)
    assert squares.mean() == pytest.approx(1.25, rel=0.03)  # a quarter of it is the shared mean's


@pytest.mark.parametrize("batch", [1, 3])
def test_every_row_picks_the_needle_first(batch: int) -> None:
    case = make_case("needle", Shape(2600, 5, 4, batch, 4), 3)
    places = [int(block) for block in re.findall(r"block (\d+)", case.source)]
    assert len(places) == batch
    ids = run_oracle(case).block_ids
    for request, block in enumerate(places):
        rows = ids[:, 5 * request : 5 * request + 5]
        own = (2600 - 1) // 128
        assert (rows[:, :, 0] == own).all(), "the local block is forced"
        assert (rows[:, :, 1] == block).all() or block == own


def test_ties_reach_across_the_last_place() -> None:
    case = make_case("ties", SMALL, 1)
    scores = run_oracle(case).scores
    ordered = np.sort(scores, axis=2)[:, :, ::-1]
    assert (ordered[:, :, SMALL.topk - 1] == ordered[:, :, SMALL.topk]).all()


def test_low_contrast_scores_hardly_differ() -> None:
    free = run_oracle(make_case("low-contrast", SMALL, 1)).scores[:, :, :-1]
    noisy = run_oracle(make_case("m3", SMALL, 1)).scores[:, :, :-1]
    assert np.std(free, axis=2).mean() < 0.2 * np.std(noisy, axis=2).mean()


def test_ragged_has_every_awkward_length() -> None:
    case = make_case("ragged", Shape(1000, 9, 1), 0)
    lengths = set(zip(case.seq_lens.tolist(), case.query_lens.tolist()))
    assert {(0, 0), (1, 1), (128, 128), (129, 1), (1000, 0)} <= lengths
    assert make_case("ragged", Shape(1, 1, 1), 0).total_q >= 1, "a context of one token is legal, too"


@pytest.mark.parametrize(
    ("kind", "shape", "argument"),
    [
        ("nope", Shape(), "KIND"),
        ("m3", Shape(context=0), "--context"),
        ("m3", Shape(context=(1 << 20) + 1), "--context"),
        ("m3", Shape(context=5, queries=6), "--queries"),
        ("m3", Shape(heads=3), "--heads"),
        ("m3", Shape(topk=65), "--topk"),
        ("m3", Shape(batch=0), "--batch"),
        ("m3", Shape(context=1 << 20, batch=1000), "--batch"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(kind: str, shape: Shape, argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        make_case(kind, shape)
    assert error.value.argument == argument
