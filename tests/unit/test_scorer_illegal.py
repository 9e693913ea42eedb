"""Every illegal input is refused by the argument's name, and the scorer is byte for byte as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from indexer import (
    IndexerConfig,
    IndexerError,
    IndexScorer,
    InvalidArgumentError,
    ScoreResult,
    UnknownSequenceError,
)
from kernel.contract import PAGE_BYTES
from tests.support.scorer_state import state_of

NAN, INF = float("nan"), float("inf")
LIVE, FORK, FREED = 0, 1, 2
MASKED = np.ma.array([1, 1], mask=[False, True])


def queries(rows: int, heads: int = 4) -> torch.Tensor:
    return torch.randn(rows, heads, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()


def keys(tokens: int) -> torch.Tensor:
    return queries(tokens, 1)[:, 0]


def with_value(tensor: torch.Tensor, position: tuple[int, ...], value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[position] = value
    return changed


def fp8_with_byte(position: tuple[int, ...], byte: int) -> torch.Tensor:
    q = torch.zeros(3, 4, 128, dtype=torch.uint8)
    q[position] = byte
    return q.view(torch.float8_e4m3fn)


@pytest.fixture
def scorer() -> IndexScorer:
    """A live sequence of 200 tokens, its fork of 201, and a freed one whose page is free again."""
    made = IndexScorer(IndexerConfig(4, 8, backend="cpu"))
    assert made.add_sequence() == LIVE
    made.append_keys(LIVE, keys(200))
    assert made.fork_sequence(LIVE) == FORK
    made.append_keys(FORK, keys(1))
    assert made.add_sequence() == FREED
    made.append_keys(FREED, keys(3))
    made.free_sequence(FREED)
    return made


class Illegal(NamedTuple):
    call: Callable[[IndexScorer], object]
    argument: str
    message: str
    error: type[IndexerError] = InvalidArgumentError


def append(k: Any, argument: str, message: str) -> Illegal:
    return Illegal(lambda scorer: scorer.append_keys(LIVE, k), argument, message)


def score(argument: str, message: str, **changed: Any) -> Illegal:
    arguments = {"q": queries(3), "sequences": [LIVE], "query_lens": None, **changed}
    return Illegal(lambda scorer: scorer.score(**arguments), argument, message)


def int32(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged_arguments() -> dict[str, Any]:
    """Three requests: 2 queries on 300 keys, padding, and 3 queries on 128 keys."""
    return {
        "q": queries(5),
        "pages": torch.zeros(4, PAGE_BYTES, dtype=torch.uint8),
        "block_table": int32([[3, 0, 2, -1], [-1, 99, -1, -1], [1, -7, 4, 4]]),
        "cu_seqlens_q": int32([0, 2, 2, 5]),
        "seq_lens": int32([300, 0, 128]),
    }


def paged(argument: str, message: str, **changed: Any) -> Illegal:
    arguments = {**paged_arguments(), **changed}
    return Illegal(lambda scorer: scorer.score_paged(**arguments), argument, message)


def table_with(row: int, column: int, page: int) -> torch.Tensor:
    table: torch.Tensor = paged_arguments()["block_table"]
    table[row, column] = page
    return table


def pages_of_stride(stride: int, offset: int = 0) -> torch.Tensor:
    memory = torch.zeros(4 * stride + PAGE_BYTES + offset, dtype=torch.uint8)
    return memory[offset:].as_strided((4, PAGE_BYTES), (stride, 1), offset)


def overlapping(name: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """An argument, and a score buffer that begins in its last 4 bytes."""
    argument: torch.Tensor = paged_arguments()[name]
    argument = argument if dtype is None else argument.to(dtype)
    memory = torch.zeros(argument.nbytes + 4 * 60, dtype=torch.uint8)
    inside = memory[: argument.nbytes].view(argument.dtype).view(argument.shape).copy_(argument)
    return {name: inside, "scores": memory[argument.nbytes - 4 :][: 4 * 60].view(torch.float32).view(4, 5, 3)}


def inference_scores() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 5, 3)


ILLEGAL: dict[str, Illegal] = {
    "append: k longer than any sequence": append(
        torch.zeros(1, 128).expand(2**40, 128), "k.shape[0]", f"{2**40}: the sequence holds 200 tokens"
    ),
    "score: q longer than any sequence": score(
        "query_lens[0]", f"{2**40}: must be at most the 200", q=torch.zeros(1, 4, 128).expand(2**40, 4, 128)
    ),
    "paged: q longer than its offsets": paged(
        "cu_seqlens_q[-1]", "5: must be total_q", q=torch.zeros(1, 4, 128).expand(2**40, 4, 128)
    ),
    "score: return_scores a string": score("return_scores", "'no': must be a bool", return_scores="no"),
    "score: return_scores None": score("return_scores", "None: must be a bool", return_scores=None),
    "paged: return_scores a number": paged("return_scores", "0: must be a bool", return_scores=0),
    "score: topk numpy float": score("topk", "2.0", topk=np.float64(2.0)),
    "score: lengths a square array": score("query_lens", "ndarray", query_lens=np.array([[3]])),
    "score: lengths an array of floats": score("query_lens[0]", "3.0", query_lens=np.array([3.0])),
    "score: lengths an array of bools": score("query_lens[0]", "True", query_lens=np.array([True])),
    "append: k is a list": append([[0.0] * 128], "k", "list: must be a torch.Tensor"),
    "append: k is numpy": append(keys(2).float().numpy(), "k", "ndarray: must be a torch.Tensor"),
    "append: k int32": append(keys(2).int(), "k.dtype", "torch.int32: must be one of"),
    "append: k float64": append(
        keys(2).double(), "k.dtype", "torch.float32; call .to(torch.float32), which keeps most digits"
    ),
    "append: lens masked": Illegal(
        lambda scorer: scorer.append_keys([LIVE, FORK], keys(2), MASKED),  # type: ignore[arg-type]
        "lens",
        "a masked array: must have no mask",
    ),
    "plan: lengths masked": Illegal(
        lambda scorer: scorer.plan(sequences=[LIVE, FORK], query_lens=MASKED), "query_lens", "a masked array"
    ),
    "score: lengths masked": score(
        "query_lens",
        "a masked array",
        sequences=[LIVE, FORK],
        query_lens=np.ma.array([2, 1], mask=[False, True]),
    ),
    "append: k fp8": append(keys(2).to(torch.float8_e4m3fn), "k.dtype", "float8"),
    "append: k one key without its axis": append(keys(1)[0], "k.shape", "(128,): must be [any, 128]"),
    "append: k narrow": append(keys(2)[:, :64], "k.shape", "(2, 64)"),
    "append: k with heads": append(queries(2), "k.shape", "(2, 4, 128)"),
    "append: k elsewhere": append(keys(2).to("meta"), "k.device", "meta: must be cpu"),
    "append: k sparse": append(keys(2).to_sparse(), "k.layout", "torch.sparse_coo"),
    "append: k NaN": append(with_value(keys(300), (299, 127), NAN), "k[299, 127]", "nan: must be finite"),
    "append: k inf": append(with_value(keys(9), (8, 0), INF), "k[8, 0]", "inf"),
    "append: k -inf, first of two": append(
        with_value(with_value(keys(9), (3, 5), -INF), (4, 0), NAN), "k[3, 5]", "-inf"
    ),
    "score: q is numpy": score("q", "ndarray", q=queries(3).float().numpy()),
    "score: q float64": score("q.dtype", "torch.float64", q=queries(3).double()),
    "score: q e5m2": score("q.dtype", "float8_e5m2", q=queries(3).to(torch.float8_e5m2)),
    "score: q of 3 heads": score("q.shape", "(3, 3, 128): must be [any, 4, 128]", q=queries(3, 3)),
    "score: q of 2 heads": score("q.shape", "(3, 2, 128)", q=queries(3, 2)),
    "score: q without heads": score("q.shape", "(3, 128)", q=keys(3)),
    "score: q narrow": score("q.shape", "(3, 4, 64)", q=queries(3)[..., :64]),
    "score: q elsewhere": score("q.device", "meta: must be cpu", q=queries(3).to("meta")),
    "score: q NaN": score("q[2, 3, 127]", "nan: must be finite", q=with_value(queries(3), (2, 3, 127), NAN)),
    "score: q inf": score("q[0, 1, 2]", "inf", q=with_value(queries(3).half(), (0, 1, 2), INF)),
    "score: q fp8 NaN": score("q[1, 2, 3]", "nan", q=fp8_with_byte((1, 2, 3), 0x7F)),
    "score: q fp8 -NaN": score("q[2, 0, 1]", "nan", q=fp8_with_byte((2, 0, 1), 0xFF)),
    "score: sequences is an id": score("sequences", "int: must be a list", sequences=LIVE),
    "score: more queries than tokens": score("query_lens[0]", "201: must be at most the 200", q=queries(201)),
    "score: lengths needed": score("query_lens", "None: must be given", sequences=[LIVE, FORK]),
    "score: lengths needed, no sequence": score("query_lens", "None: must be given", sequences=[]),
    "score: a length missing": score(
        "query_lens", "[3]: must hold 2 lengths", sequences=[LIVE, FORK], query_lens=[3]
    ),
    "score: lengths too small": score(
        "query_lens", "[1, 1]: must add up to q.shape[0] = 3", sequences=[LIVE, FORK], query_lens=[1, 1]
    ),
    "score: negative length": score(
        "query_lens[1]", "-1: must be an int, 0 or more", sequences=[LIVE, FORK], query_lens=[4, -1]
    ),
    "score: length not whole": score("query_lens[0]", "3.0", query_lens=[3.0]),
    "score: lengths a tensor": score("query_lens", "Tensor", query_lens=int32([3])),
    "score: length beyond its sequence": score(
        "query_lens[1]", "202", q=queries(203), sequences=[LIVE, FORK], query_lens=[1, 202]
    ),
    "score: topk 0": score("topk", "0: must be 1 to 64", topk=0),
    "score: topk 65": score("topk", "65: must be 1 to 64", topk=65),
    "score: topk True": score("topk", "True: must be an int", topk=True),
    "score: init -1": score("init_blocks", "-1: must be 0 or more", init_blocks=-1),
    "score: local -1": score("local_blocks", "-1: must be 0 or more", local_blocks=-1),
    "score: local 1.0": score("local_blocks", "1.0: must be an int", local_blocks=1.0),
    "score: order": score("order", "'asc': must be 'score' or 'block'", order="asc"),
    "paged: q NaN": paged("q[4, 0, 0]", "nan", q=with_value(queries(5), (4, 0, 0), NAN)),
    "paged: q heads": paged("q.shape", "(5, 2, 128)", q=queries(5, 2)),
    "paged: pages is bytes": paged("pages", "bytes", pages=bytes(PAGE_BYTES)),
    "paged: pages int8": paged(
        "pages.dtype",
        "torch.uint8; call .view(torch.uint8)",
        pages=torch.zeros(4, PAGE_BYTES, dtype=torch.int8),
    ),
    "paged: pages flat": paged("pages.shape", "(9216,)", pages=torch.zeros(PAGE_BYTES, dtype=torch.uint8)),
    "paged: pages narrow": paged("pages.shape", "(4, 9215)", pages=torch.zeros(4, 9215, dtype=torch.uint8)),
    "paged: pages elsewhere": paged(
        "pages.device", "meta", pages=torch.zeros(4, PAGE_BYTES, dtype=torch.uint8, device="meta")
    ),
    "paged: page stride unaligned": paged("pages.stride(0)", "9224", pages=pages_of_stride(PAGE_BYTES + 8)),
    "paged: pages overlap": paged("pages.stride(0)", "9200", pages=pages_of_stride(PAGE_BYTES - 16)),
    "paged: pages unaligned": paged(
        "pages.data_ptr()", "multiple of 16", pages=pages_of_stride(PAGE_BYTES, 8)
    ),
    "paged: page bytes apart": paged(
        "pages.stride()", "contiguous", pages=torch.zeros(4, 2 * PAGE_BYTES, dtype=torch.uint8)[:, ::2]
    ),
    "paged: table int64": paged("block_table.dtype", "torch.int64", block_table=table_with(0, 0, 0).long()),
    "paged: table flat": paged("block_table.shape", "(4,)", block_table=table_with(0, 0, 0)[0]),
    "paged: table narrow": paged(
        "block_table.shape[1]", "2: must be at least 3", block_table=table_with(0, 0, 0)[:, :2]
    ),
    "paged: table short": paged(
        "cu_seqlens_q.shape", "(4,): must be [3]", block_table=table_with(0, 0, 0)[:2]
    ),
    "paged: table elsewhere": paged("block_table.device", "meta", block_table=table_with(0, 0, 0).to("meta")),
    "paged: page id past the cache": paged(
        "block_table[0, 2]", "4: must lie in [0, 4)", block_table=table_with(0, 2, 4)
    ),
    "paged: page id -1": paged(
        "block_table[2, 0]", "-1: must lie in [0, 4)", block_table=table_with(2, 0, -1)
    ),
    "paged: page id far out": paged(
        "block_table[0, 1]", str(2**31 - 1), block_table=table_with(0, 1, 2**31 - 1)
    ),
    "paged: offsets int64": paged(
        "cu_seqlens_q.dtype", "torch.int64", cu_seqlens_q=torch.tensor([0, 2, 2, 5])
    ),
    "paged: offsets short": paged("cu_seqlens_q.shape", "(3,): must be [4]", cu_seqlens_q=int32([0, 2, 5])),
    "paged: offsets start": paged("cu_seqlens_q[0]", "1: must be 0", cu_seqlens_q=int32([1, 2, 2, 5])),
    "paged: offsets decrease": paged(
        "cu_seqlens_q[2]", "1: must be at least cu_seqlens_q[1] = 2", cu_seqlens_q=int32([0, 2, 1, 5])
    ),
    "paged: offsets end": paged(
        "cu_seqlens_q[-1]", "6: must be total_q = 5", cu_seqlens_q=int32([0, 2, 2, 6])
    ),
    "paged: offsets elsewhere": paged(
        "cu_seqlens_q.device", "meta", cu_seqlens_q=int32([0, 2, 2, 5]).to("meta")
    ),
    "paged: lengths int64": paged("seq_lens.dtype", "torch.int64", seq_lens=torch.tensor([300, 0, 128])),
    "paged: lengths short": paged("seq_lens.shape", "(2,): must be [3]", seq_lens=int32([300, 128])),
    "paged: fewer keys than queries": paged(
        "seq_lens[2]", "2: must be at least its 3 queries", seq_lens=int32([300, 0, 2])
    ),
    "paged: negative length": paged("seq_lens[1]", "-1", seq_lens=int32([300, -1, 128])),
    "paged: length past the longest": paged("seq_lens[0]", "1048577", seq_lens=int32([2**20 + 1, 0, 128])),
    "paged: lengths a list": paged("seq_lens", "list", seq_lens=[300, 0, 128]),
    "paged: scores is a list": paged("scores", "list", scores=[]),
    "paged: scores fp16": paged("scores.dtype", "torch.float16", scores=torch.zeros(4, 5, 3).half()),
    "paged: scores token-major": paged("scores.shape", "(5, 4, 3)", scores=torch.zeros(5, 4, 3)),
    "paged: scores narrow": paged("scores.shape[2]", "2: must be at least 3", scores=torch.zeros(4, 5, 2)),
    "paged: scores elsewhere": paged("scores.device", "meta", scores=torch.zeros(4, 5, 3, device="meta")),
    "paged: scores strided": paged("scores.stride(2)", "2: must be 1", scores=torch.zeros(4, 5, 6)[..., ::2]),
    "paged: scores overlap": paged(
        "scores.stride()", "(0, 3, 1)", scores=torch.zeros(1, 5, 3).expand(4, 5, 3)
    ),
    "paged: scores overlap in part": paged(
        "scores.stride()", "(15, 2, 1)", scores=torch.zeros(99).as_strided((4, 5, 3), (15, 2, 1))
    ),
    "paged: scores in q": paged("scores.data_ptr()", "must not share memory with q", **overlapping("q")),
    "paged: scores in fp8 q": paged(
        "scores.data_ptr()", "must not share memory with q", **overlapping("q", torch.float8_e4m3fn)
    ),
    "paged: scores in pages": paged(
        "scores.data_ptr()", "must not share memory with pages", **overlapping("pages")
    ),
    "paged: scores in the table": paged(
        "scores.data_ptr()", "must not share memory with block_table", **overlapping("block_table")
    ),
    "paged: scores of inference mode": paged(
        "scores", "an inference tensor: torch does not let it be written", scores=inference_scores()
    ),
    "paged: scores that are not returned": paged(
        "return_scores", "False: scores was given", scores=torch.zeros(4, 5, 3), return_scores=False
    ),
    "paged: topk 65": paged("topk", "65", topk=65),
    "paged: init -1": paged("init_blocks", "-1", init_blocks=-1),
    "paged: local -1": paged("local_blocks", "-1", local_blocks=-1),
    "paged: order": paged("order", "'blocks': must be", order="blocks"),
}
SEQUENCE_CALLS: dict[str, Callable[[IndexScorer, Any], object]] = {
    "append": lambda scorer, seq: scorer.append_keys(
        cast("Any", [seq] if isinstance(seq, list) else seq), keys(1)
    ),
    "append to two": lambda scorer, seq: scorer.append_keys([LIVE, seq], keys(2)),
    "truncate": lambda scorer, seq: scorer.truncate_sequence(seq, 0),
    "score": lambda scorer, seq: scorer.score(queries(1), [seq]),
    "score second": lambda scorer, seq: scorer.score(queries(2), [LIVE, seq]),
    "fork": lambda scorer, seq: scorer.fork_sequence(seq),
    "free": lambda scorer, seq: scorer.free_sequence(seq),
    "length": lambda scorer, seq: scorer.sequence_length(seq),
    "table": lambda scorer, seq: scorer.block_table(seq),
    "tables": lambda scorer, seq: scorer.block_tables([LIVE, seq]),
    "plan": lambda scorer, seq: scorer.plan(sequences=[seq], query_lens=[1]),
}
UNKNOWN_IDS: list[Any] = [
    -1,
    99,
    FREED,
    True,
    np.True_,
    np.int64(99),
    0.0,
    np.float32(0),
    "0",
    None,
    [LIVE],
    torch.tensor(LIVE),
]


def of_sequence(call: Callable[[IndexScorer, Any], object], seq: Any) -> Illegal:
    message = f"{seq!r}: not a live sequence"
    return Illegal(lambda scorer: call(scorer, seq), "sequence", message, UnknownSequenceError)


ILLEGAL |= {
    f"{name}: sequence {seq!r}": of_sequence(call, seq)
    for seq in UNKNOWN_IDS
    for name, call in SEQUENCE_CALLS.items()
}


@pytest.mark.parametrize("illegal", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_input_is_refused_by_name_and_changes_nothing(scorer: IndexScorer, illegal: Illegal) -> None:
    before = state_of(scorer)
    with pytest.raises(illegal.error) as caught:
        illegal.call(scorer)
    assert type(caught.value) is illegal.error
    assert str(caught.value).startswith(f"{illegal.argument} = ")
    assert illegal.message in str(caught.value)
    assert "; " in str(caught.value), "a remedy"
    if illegal.error is InvalidArgumentError:
        assert isinstance(caught.value, ValueError)
    assert state_of(scorer) == before


def test_the_legal_calls_that_the_table_starts_from(scorer: IndexScorer) -> None:
    before = state_of(scorer)
    assert scorer.score(queries(3), [LIVE]).block_ids.shape == (4, 3, 16)
    paged_result: ScoreResult = scorer.score_paged(**paged_arguments(), scores=torch.zeros(4, 5, 3))
    assert paged_result.num_blocks.tolist() == [3, 3, 1, 1, 1]
    assert state_of(scorer) == before


def test_a_refused_call_leaves_the_score_buffer_alone(scorer: IndexScorer) -> None:
    buffer = torch.full((4, 5, 3), 7.0)
    with pytest.raises(InvalidArgumentError):
        scorer.score_paged(**{**paged_arguments(), "seq_lens": int32([300, 0, 2])}, scores=buffer)
    assert bool((buffer == 7.0).all())


@pytest.mark.parametrize("integer", [np.int8, np.uint16, np.int32, np.int64])
def test_integers_of_numpy_are_as_good_as_python_s(scorer: IndexScorer, integer: type[Any]) -> None:
    expected = scorer.score(queries(3), [LIVE, FORK], [1, 2], topk=2, init_blocks=1, local_blocks=0)
    ids = [integer(LIVE), integer(FORK)]
    for lens in ([integer(1), integer(2)], np.array([1, 2], dtype=integer)):
        got = scorer.score(
            queries(3), ids, lens, topk=integer(2), init_blocks=integer(1), local_blocks=integer(0)
        )
        assert torch.equal(got.block_ids, expected.block_ids)
    scorer.append_keys(ids[0], keys(2))
    assert scorer.sequence_length(ids[0]) == scorer.sequence_length(LIVE) == 202
    assert scorer.sequence_length(scorer.fork_sequence(ids[0])) == 202
    scorer.free_sequence(ids[0])
    assert LIVE not in scorer.sequences


def test_scores_beside_what_is_read_are_legal(scorer: IndexScorer) -> None:
    """One slab that holds q and, right after it, the scores."""
    q = queries(5)
    slab = torch.zeros(q.nbytes + 4 * 60, dtype=torch.uint8)
    inside = slab[: q.nbytes].view(q.dtype).view(q.shape).copy_(q)
    scores = slab[q.nbytes :].view(torch.float32).view(4, 5, 3)
    scorer.score_paged(**{**paged_arguments(), "q": inside}, scores=scores)
    assert torch.equal(inside, q)
