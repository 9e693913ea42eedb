"""Query options, and the limits of a call: its memory and work are computed before anything is allocated."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, field_validator

from indexer.case import Case
from indexer.case.case import MAX_FORCED_BLOCKS
from kernel.backends.base import Order
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, MAX_SEQ_LEN, MAX_TOPK, PAGE_BYTES
from kernel.page import blocks_of
from server.problems import invalid

MAX_REQUESTS = 65536
"""Most requests in a batch."""
MAX_TRACED_REQUESTS = 512
"""Most requests of a case that is traced."""
MAX_JSON_SCORES = 1 << 18
"""Most numbers of a tensor in a JSON answer."""
MAX_FLOP_CPU, MAX_FLOP_GPU = 5e11, 1e14
"""Work that a call may take when no setting says. Either is more than ten prefill steps of 8,192 queries, on
a CPU with a context of 8,192 tokens, on a GPU with one of 2^20. Two CPU cores take 5 s for theirs."""
_BLOCK_FLOP = 2 * HEAD_DIM * BLOCK_TOKENS
"""Work of a row and a block."""
PAGE_ROWS = 256
"""Rows that cost as much as reading a page: the cpu backend unpacks one in 80 us and scores 3 rows a us."""
REQUEST_ROWS = 768
"""Rows that cost as much as the shortest request, 2.5e7 flop: 250 to 390 us on the cpu backend."""


@dataclass(frozen=True)
class CallLimits:
    """What one call may take.

    Attributes:
        max_bytes: memory for its scores, pages and block tables.
        max_flop: work, as :func:`call_flop` counts it.
    """

    max_bytes: int
    max_flop: float


def call_flop(num_heads: int, seq_lens: Sequence[int], query_lens: Sequence[int]) -> int:
    """Returns the work of a call: ``2 * 128 * 128`` for every visible (row, block), and for :data:`PAGE_ROWS`
    rows more for every page of every request, and :data:`REQUEST_ROWS` rows of one block for every request.

    Args:
        num_heads: H, index heads.
        seq_lens: tokens of each request.
        query_lens: queries of each, its last positions.
    """
    row_blocks = REQUEST_ROWS * len(seq_lens)
    for tokens, queries in zip(seq_lens, query_lens):
        if queries > 0:
            rows = _row_blocks(tokens) - _row_blocks(max(0, tokens - queries))
            row_blocks += num_heads * rows + PAGE_ROWS * blocks_of(tokens)
    return _BLOCK_FLOP * row_blocks


def check_case(case: Case, limits: CallLimits, *, scores: bool) -> None:
    """Refuses a case beyond the limits.

    Raises:
        ProblemError: 422.
    """
    _check_requests("seq_lens", case.batch)
    lengths = case.seq_lens.tolist()
    size = 0
    if case.index_k is not None:
        blocks = [blocks_of(tokens) for tokens in lengths]
        size = sum(blocks) * PAGE_BYTES + 4 * len(blocks) * max(blocks, default=0)
        _check_size("seq_lens", f"{case.batch} requests", size, limits, "score fewer requests at a time")
    if scores:
        _check_scores(size, case.num_heads, case.total_q, case.num_score_blocks, limits)
    _check_flop(case.num_heads, lengths, case.query_lens.tolist(), limits)


def check_sequences(
    num_heads: int,
    total_q: int,
    lengths: Sequence[int],
    query_lens: Sequence[int] | None,
    limits: CallLimits,
    *,
    scores: bool,
) -> None:
    """Refuses a call on sequences of these lengths beyond the limits. The scorer checks the query lengths.

    Raises:
        ProblemError: 422.
    """
    _check_requests("sequences", len(lengths))
    blocks = blocks_of(max(lengths, default=0))
    size = 4 * len(lengths) * blocks
    _check_size("sequences", f"{len(lengths)} sequences", size, limits, "name fewer sequences at a time")
    if scores:
        _check_scores(size, num_heads, total_q, blocks, limits)
    if query_lens is None:
        query_lens = [total_q] if len(lengths) == 1 else [1] * len(lengths)
    _check_flop(num_heads, lengths, query_lens, limits)


def check_trace(case: Case) -> None:
    """Refuses to trace a case of many requests: each is some operations, and each of those some kilobytes.

    Raises:
        ProblemError: 422.
    """
    if case.batch > MAX_TRACED_REQUESTS:
        limit = f"traces a case of at most {MAX_TRACED_REQUESTS} requests, this one has {case.batch}"
        raise invalid("trace", "true", limit, "trace some of them")


def check_json_reply(num_values: int) -> None:
    """Refuses to write a large tensor as JSON.

    Raises:
        ProblemError: 422.
    """
    if num_values > MAX_JSON_SCORES:
        raise invalid(
            "Accept",
            "application/json",
            f"the answer has {num_values} numbers, {MAX_JSON_SCORES} at most go into JSON",
            "accept application/octet-stream, or pass scores=false",
        )


def _row_blocks(tokens: int) -> int:
    """Returns the sum of causal blocks of rows at positions ``0 .. tokens - 1``."""
    whole, rest = divmod(tokens, BLOCK_TOKENS)
    return BLOCK_TOKENS * whole * (whole + 1) // 2 + rest * (whole + 1)


def _check_requests(argument: str, count: int) -> None:
    if count > MAX_REQUESTS:
        raise invalid(
            f"{argument}.shape[0]", count, f"must be at most {MAX_REQUESTS} requests", "split the batch"
        )


def _check_scores(size: int, num_heads: int, total_q: int, blocks: int, limits: CallLimits) -> None:
    shape = f"[{num_heads}, {total_q}, {blocks}]"
    size += 4 * num_heads * total_q * blocks
    _check_size("scores", shape, size, limits, "pass scores=false, or score fewer queries at a time")


def _check_size(argument: str, value: str, size: int, limits: CallLimits, remedy: str) -> None:
    if size > limits.max_bytes:
        raise invalid(
            argument,
            value,
            f"the call takes {size} bytes and may take {limits.max_bytes} (max_call_bytes)",
            remedy,
        )


def _check_flop(
    num_heads: int, seq_lens: Sequence[int], query_lens: Sequence[int], limits: CallLimits
) -> None:
    blocks = blocks_of(max(seq_lens, default=0))
    most = blocks * (num_heads * sum(query_lens) + PAGE_ROWS * len(seq_lens)) + REQUEST_ROWS * len(seq_lens)
    if _BLOCK_FLOP * most <= limits.max_flop:
        return  # an upper bound, as if every row saw the longest request: cheap for a decode step
    flop = call_flop(num_heads, seq_lens, query_lens)
    if flop > limits.max_flop:
        raise invalid(
            "index_q",
            f"{sum(query_lens)} queries of {len(seq_lens)} requests, the longest of {max(seq_lens)} tokens",
            f"the call takes {flop:.3g} flop and may take {limits.max_flop:.3g} (max_call_flop)",
            "score fewer queries at a time, or raise the server's limit",
        )


# ---- Query options ----


_JSON_VALUE = re.compile(r"true|false|-?(0|[1-9][0-9]{0,17})", re.ASCII)


class _Options(BaseModel):
    """Options of a query. Their values are as strict as JSON: ``4.0``, ``1_6`` and ``yes`` are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _as_json(cls, value: object) -> object:
        is_json = isinstance(value, str) and _JSON_VALUE.fullmatch(value)
        return json.loads(value) if is_json else value  # type: ignore[arg-type]


class ScoreOptions(_Options):
    """Options of a scoring call. What is not given is the case's, or for sequences the server's."""

    topk: int | None = Field(default=None, ge=1, le=MAX_TOPK, description="Blocks to select for a row.")
    init_blocks: int | None = Field(
        default=None, ge=0, le=MAX_FORCED_BLOCKS, description="Blocks forced at a row's start."
    )
    local_blocks: int | None = Field(
        default=None,
        ge=0,
        le=MAX_FORCED_BLOCKS,
        description="Blocks forced at a row's end; wins over init_blocks.",
    )
    order: Order | None = Field(
        default=None, description="`score`: best block first. `block`: block ids ascending. -1 last in both."
    )
    scores: bool = Field(default=True, description="Whether the answer holds the scores, too.")


class ProfileOptions(_Options):
    """Options of a profile."""

    cache: Literal["cold", "warm"] = Field(
        default="cold", description="`cold`: the device's caches are flushed before each run."
    )
    repeats: int = Field(
        default=5, ge=1, le=100, description="Runs that are measured, after one that is not."
    )
    scores: bool = Field(
        default=False, description="Whether the scores are kept, as a caller that wants them would."
    )
    trace: bool = Field(default=False, description="Whether to add a chrome trace of one more run.")


class AppendOptions(_Options):
    """Options of an append."""

    start: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEQ_LEN,
        description="Append only if the sequence holds so many tokens, else 409. A request that is repeated "
        "after a lost answer is answered as before if its keys were the last that were appended.",
    )


def check_given_once(query: bytes) -> None:
    """Refuses an option that is given twice: which one counts would be a guess.

    Raises:
        ProblemError: 422.
    """
    if b"&" in query:
        names = Counter(name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True))
        for name, count in names.items():
            if count > 1:
                raise invalid(name[:60], f"{count} values", "must be given once", "leave the others out")
