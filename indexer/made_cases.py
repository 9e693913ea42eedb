"""Makes cases of known difficulty: the same arguments give the same bytes anywhere. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, MAX_SEQ_LEN, MAX_TOPK, SUPPORTED_HEADS
from kernel.errors import InvalidArgumentError

# ---- Random numbers: numpy promises the same bits in every version of raw PCG64 only ----

Floats = NDArray[np.float32]
PART = 1 << 20
"""Values made at a time: a large case then takes little more memory than its own numbers."""


class Stream:
    """Bell-shaped numbers from a seed: sums of four 16-bit integers, of variance 1 and exact in fp32."""

    _SCALE = np.float32(np.sqrt(3.0) / 65536)

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def normal(self, *shape: int) -> Floats:
        """Numbers of mean 0 and variance 1."""
        values = np.empty(shape, dtype=np.float32)
        for part in np.split(values.reshape(-1), range(PART, values.size, PART)):
            parts = self._raw(part.size).view("<u2").reshape(-1, 4).astype(np.int64)
            # Integers are added in one way only; a mean of floats would differ from machine to machine.
            centred = (2 * parts.sum(axis=1) - 4 * 65535).astype(np.float32)
            np.multiply(centred, np.float32(self._SCALE / 2), out=part)
        return values

    def integers(self, low: int, high: int, count: int) -> NDArray[np.int64]:
        """Integers from ``low`` to ``high - 1``; what a modulus favours is below 2^-32."""
        offsets: NDArray[np.int64] = (self._raw(count) % np.uint64(high - low)).astype(np.int64)
        return offsets + low

    def unit_rms(self, *shape: int) -> Floats:
        """Vectors of mean square 1 over the last axis, as index queries and keys are normalised."""
        values = self.normal(*shape)
        rows = values.reshape(-1, shape[-1])
        for part in np.split(rows, range(PART // shape[-1], len(rows), PART // shape[-1])):
            squares = np.square(part.astype(np.float64)).cumsum(axis=-1)[:, -1:]  # one order of adding
            part /= np.sqrt(squares / shape[-1]).astype(np.float32)
        return values

    def _raw(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(count), dtype="<u8")


def bf16(values: Floats) -> NDArray[np.generic]:
    """As index queries and keys come from a model."""
    return values.astype(ml_dtypes.bfloat16)


# ---- The kinds of cases, one function each ----

M3_HEADS = 4
"""Index heads of MiniMax-M3, shared by its ranks."""
MAX_ROW_VALUES = 1 << 31
"""Most values of queries or keys: 4 GiB in bf16."""
LOW_CONTRAST = np.float32(1 / 64)
"""Size of what tells low-contrast keys apart, beside keys of mean square 1."""
NEEDLE_GAIN = np.float32(1.5)
"""How far a needle stands out: its product with the query is this times the query's own square."""
HALF = np.float32(0.5)
TIED_KEYS = 3
"""Different blocks of keys in a case of ties: all others repeat them."""


@dataclass(frozen=True)
class Shape:
    """Size of a case.

    Attributes:
        context: keys of a request, 1 to 1,048,576.
        queries: query tokens of a request, at most its keys.
        heads: 1, 2 or 4.
        batch: requests; ``ragged`` has its own lengths up to ``context``.
        topk: blocks a row selects.
    """

    context: int = 8192
    queries: int = 64
    heads: int = M3_HEADS
    batch: int = 1
    topk: int = 16


Requests = list[tuple[int, int]]
"""``(keys, queries)`` of each request."""
Filler = Callable[[Stream, Requests, int], tuple[Floats, Floats, str]]
"""Stream, requests and heads to queries ``[total_q, H, 128]``, keys ``[total_k, 128]``, what is special."""


def make_case(kind: str, shape: Shape, seed: int = 0) -> Case:
    """Make a case.

    Args:
        kind: one of :data:`KINDS`.
        shape: its size.
        seed: 0 or more.

    Raises:
        InvalidArgumentError: an argument is outside its limits; the message names it.
    """
    if kind not in KINDS:
        raise InvalidArgumentError("KIND", repr(kind), f"must be one of {', '.join(KINDS)}", "choose one")
    _check(shape, seed)
    requests = _ragged(shape) if kind == "ragged" else [(shape.context, shape.queries)] * shape.batch
    queries, keys, special = KINDS[kind](Stream(seed), requests, shape.heads)
    return Case(
        index_q=bf16(queries),
        index_k=bf16(keys),
        cu_seqlens_q=np.cumsum([0, *(count for _, count in requests)]).astype(np.int32),
        seq_lens=np.array([length for length, _ in requests], dtype=np.int32),
        topk=shape.topk,
        source=f"made: {kind}, seed {seed}{special}",
    )


def _m3(stream: Stream, requests: Requests, heads: int) -> tuple[Floats, Floats, str]:
    """Queries and keys of unit rms with a mean that keys share, as a model's have."""
    mean = stream.unit_rms(HEAD_DIM)
    keys = stream.unit_rms(_keys(requests), HEAD_DIM)
    queries = stream.unit_rms(_queries(requests), heads, HEAD_DIM)
    for vectors in (keys, queries):  # in place: they may be most of this machine's memory
        vectors += mean * HALF
    return queries, keys, ""


def _needle(stream: Stream, requests: Requests, heads: int) -> tuple[Floats, Floats, str]:
    """One key of each request is along all of its queries: its block must be every row's first choice."""
    keys = stream.unit_rms(_keys(requests), HEAD_DIM)
    places = []
    parts = []
    first_key = 0
    for length, count in requests:
        wanted = stream.unit_rms(HEAD_DIM)
        last = max(1, length - count)  # so that every query sees it
        place = int(stream.integers(0, last, 1)[0])
        keys[first_key + place] = NEEDLE_GAIN * wanted
        parts.append(wanted + stream.unit_rms(count, heads, HEAD_DIM) * HALF * HALF)
        places.append(f"{place} (block {place // BLOCK_TOKENS})")
        first_key += length
    queries = np.concatenate([np.zeros((0, heads, HEAD_DIM), np.float32), *parts])
    return queries, keys, f"; needle at position {', '.join(places[:8])}" if places else ""


def _low_contrast(stream: Stream, requests: Requests, heads: int) -> tuple[Floats, Floats, str]:
    """Keys that hardly differ: the gap at the k-th place is far below what quantisation changes."""
    mean = stream.unit_rms(HEAD_DIM)
    keys = stream.unit_rms(_keys(requests), HEAD_DIM)
    keys *= LOW_CONTRAST
    keys += mean
    return stream.unit_rms(_queries(requests), heads, HEAD_DIM), keys, ""


def _ties(stream: Stream, requests: Requests, heads: int) -> tuple[Floats, Floats, str]:
    """Whole blocks repeat: exact ties at every place, also the last."""
    blocks = stream.unit_rms(TIED_KEYS, BLOCK_TOKENS, HEAD_DIM)
    parts: list[Floats] = [np.zeros((0, HEAD_DIM), dtype=np.float32)]
    for length, _ in requests:
        count = -(-length // BLOCK_TOKENS)
        chosen = blocks[stream.integers(0, TIED_KEYS, count)]
        parts.append(chosen.reshape(-1, HEAD_DIM)[:length])
    return stream.unit_rms(_queries(requests), heads, HEAD_DIM), np.concatenate(parts), ""


KINDS: Mapping[str, Filler] = {
    "m3": _m3,
    "needle": _needle,
    "low-contrast": _low_contrast,
    "ties": _ties,
    "ragged": _m3,
}
"""Kinds of cases; ``ragged`` is ``m3`` over requests of every awkward length."""


def _ragged(shape: Shape) -> Requests:
    """Prefill, decode, padding, and lengths at and beside block ends, none beyond the context."""
    most, queries = shape.context, shape.queries
    wanted = [
        (most, queries),
        (0, 0),
        (most // 2 + 1, 1),
        (1, 1),
        (BLOCK_TOKENS, BLOCK_TOKENS),
        (BLOCK_TOKENS + 1, 1),
        (2 * BLOCK_TOKENS - 1, 2),
        (most, 0),
        (most // 3, queries // 2),
        (most - 1, 1),
    ]
    return [(min(length, most), min(count, length, most)) for length, count in wanted]


def _keys(requests: Requests) -> int:
    return sum(length for length, _ in requests)


def _queries(requests: Requests) -> int:
    return sum(count for _, count in requests)


def _check(shape: Shape, seed: int) -> None:
    for name, value, least, most in (
        ("--context", shape.context, 1, MAX_SEQ_LEN),
        ("--queries", shape.queries, 1, shape.context),
        ("--batch", shape.batch, 1, 1025),
        ("--topk", shape.topk, 1, MAX_TOPK),
        ("--seed", seed, 0, (1 << 63) - 1),
    ):
        if not least <= value <= most:
            raise InvalidArgumentError(name, value, f"must be {least} to {most}", "choose one of them")
    if shape.heads not in SUPPORTED_HEADS:
        raise InvalidArgumentError("--heads", shape.heads, f"must be one of {SUPPORTED_HEADS}", "choose one")
    values = shape.batch * max(shape.context, shape.queries * shape.heads) * HEAD_DIM
    if values > MAX_ROW_VALUES:
        limit = f"must be at most {MAX_ROW_VALUES} values of keys or queries"
        raise InvalidArgumentError("--batch", f"{shape.batch} ({values} values)", limit, "make it smaller")


__all__ = ["KINDS", "Shape", "make_case"]
