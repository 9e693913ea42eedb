"""How large a call may be: what it would take is computed and refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from indexer.case import Case
from kernel.contract import PAGE_BYTES
from kernel.page import blocks_of
from server.problems import invalid

MAX_REQUESTS = 65536
"""Most requests of a batch."""
MAX_JSON_SCORES = 1 << 18
"""Most numbers of a tensor in a JSON answer."""


def check_case(case: Case, max_bytes: int, *, scores: bool) -> None:
    """Refuse a case whose scores, pages and block table would take more than ``max_bytes``.

    Raises:
        ProblemError: 422.
    """
    _check_requests("seq_lens", case.batch)
    size = 0
    if case.index_k is not None:
        blocks = [blocks_of(tokens) for tokens in case.seq_lens.tolist()]
        size = sum(blocks) * PAGE_BYTES + 4 * len(blocks) * max(blocks, default=0)
        _check_size("seq_lens", f"{case.batch} requests", size, max_bytes, "score fewer requests at a time")
    if scores:
        _check_scores(size, case.num_heads, case.total_q, case.num_score_blocks, max_bytes)


def check_sequences(
    num_heads: int, total_q: int, lengths: Sequence[int], max_bytes: int, *, scores: bool
) -> None:
    """Refuse a call on sequences of these lengths that would take more than ``max_bytes``.

    Raises:
        ProblemError: 422.
    """
    _check_requests("sequences", len(lengths))
    blocks = blocks_of(max(lengths, default=0))
    size = 4 * len(lengths) * blocks
    _check_size("sequences", f"{len(lengths)} sequences", size, max_bytes, "name fewer sequences at a time")
    if scores:
        _check_scores(size, num_heads, total_q, blocks, max_bytes)


def check_json_reply(num_values: int) -> None:
    """Refuse to write a large tensor as JSON.

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


def _check_requests(argument: str, count: int) -> None:
    if count > MAX_REQUESTS:
        raise invalid(
            f"{argument}.shape[0]", count, f"must be at most {MAX_REQUESTS} requests", "split the batch"
        )


def _check_scores(size: int, num_heads: int, total_q: int, blocks: int, max_bytes: int) -> None:
    shape = f"[{num_heads}, {total_q}, {blocks}]"
    size += 4 * num_heads * total_q * blocks
    _check_size("scores", shape, size, max_bytes, "pass scores=false, or score fewer queries at a time")


def _check_size(argument: str, value: str, size: int, max_bytes: int, remedy: str) -> None:
    if size > max_bytes:
        raise invalid(
            argument, value, f"the call takes {size} bytes and may take {max_bytes} (max_call_bytes)", remedy
        )
