"""A sample of rows, faulty and right, and what an engine with a given fault would have recorded for them.

Each step of the contract may be wrong: the bytes read for a block, the keys decoded from them, the queries,
the keys that a row sees, the forced blocks, and how ids are selected and written.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineOrder, EngineRecord
from indexer.explain.verdict import Bools, Bytes, Floats, Grades, Ids, Ints, known
from kernel.backends.reference.quantizer import E2M1_MAGNITUDES, e4m3_bytes, e4m3_values
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import (
    BLOCK_TOKENS,
    CODE_BYTES,
    GROUP_DIMS,
    GROUPS,
    HEAD_DIM,
    PAGE_BYTES,
    TOKEN_CODE_BYTES,
)

FAULTY_ROWS, RIGHT_ROWS = 32, 16
"""Rows of a sample, at most."""
MAX_PAGES = 1024
"""Pages of a sample's requests, at most."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Rows of a sample, sorted by request.

    Attributes:
        case: the whole call, its keys in pages.
        request: ``[R]``, of the batch.
        head: ``[R]``.
        token: ``[R]`` query token in the whole call.
        faulty: ``[R]`` rows where the engine is wrong.
        scores: ``[R, S]`` the engine's; None if not recorded.
        block_ids: ``[R, k]`` the engine's; None if not recorded.
        tolerance: in units of ``sum_i |q_i k_i|``.
        blocks: ascending score columns that predictions compute; all when None.
    """

    case: Case
    request: Ints
    head: Ints
    token: Ints
    faulty: Bools
    scores: Floats | None
    block_ids: Ids | None
    tolerance: float
    blocks: Ints | None = None
    _decoded: OrderedDict[tuple[int, bytes], tuple[Floats, Floats]] = field(default_factory=OrderedDict)
    _others: dict[tuple[bytes, bytes], Evidence] = field(default_factory=dict, init=False)

    @cached_property
    def prefix(self) -> Ints:
        """``[R]`` keys before the first query of each row's request."""
        lens = self.case.seq_lens.astype(np.int64) - self.case.query_lens
        return np.asarray(lens[self.request], dtype=np.int64)

    @cached_property
    def query(self) -> Ints:
        """``[R]`` each row's query, counted in its request."""
        return np.asarray(self.token - self.case.cu_seqlens_q[self.request], dtype=np.int64)

    @cached_property
    def position(self) -> Ints:
        """``[R]`` positions by the contract."""
        return self.prefix + self.query

    @cached_property
    def seq_len(self) -> Ints:
        """``[R]`` keys of each row's request."""
        return np.asarray(self.case.seq_lens[self.request], dtype=np.int64)

    @cached_property
    def num_score_blocks(self) -> int:
        """Blocks of the longest request of the call."""
        return self.case.num_score_blocks

    @cached_property
    def num_blocks(self) -> Ints:
        """``[R]`` blocks that each row sees."""
        return np.asarray(self.position // BLOCK_TOKENS + 1, dtype=np.int64)

    @cached_property
    def visible(self) -> Bools:
        """``[R, S]`` blocks that each row sees."""
        return np.asarray(np.arange(self.num_score_blocks) < self.num_blocks[:, None])

    @cached_property
    def recorded(self) -> Floats:
        """``[R, S]`` the engine's scores, without columns past the call's last block."""
        return known(self.scores)[:, : self.num_score_blocks]

    @cached_property
    def requests(self) -> list[tuple[int, Ints, int]]:
        """Each request of these rows, which rows are its own, and how many blocks it has."""
        blocks = request_blocks(self.case)
        return [
            (int(one), np.flatnonzero(self.request == one), int(blocks[one]))
            for one in np.unique(self.request)
        ]

    @property
    def ids(self) -> Ids:
        """``[R, k]`` the engine's ids."""
        return known(self.block_ids)

    @property
    def engine(self) -> EngineRecord:
        """The engine's result of the whole call."""
        return known(self.case.engine)

    @property
    def order(self) -> EngineOrder:
        """The stated order of the engine's ids."""
        return "any" if self.case.engine is None else self.case.engine.order

    def page(self, place: int) -> Bytes:
        """``[9216]`` bytes of one page of the file."""
        return np.asarray(self.pages[place])

    @property
    def pages(self) -> Bytes:
        """``[num_pages, 9216]``."""
        return known(self.case.pages).reshape(-1, PAGE_BYTES)

    @property
    def table(self) -> Ids:
        """``[batch, max_blocks]``."""
        return known(self.case.block_table)

    def subset(self, rows: Ints) -> Evidence:
        """Some of these rows."""
        return replace(
            self,
            request=self.request[rows],
            head=self.head[rows],
            token=self.token[rows],
            faulty=self.faulty[rows],
            scores=None if self.scores is None else self.scores[rows],
            block_ids=None if self.block_ids is None else self.block_ids[rows],
        )

    def narrowed(self, blocks: Ints) -> Evidence:
        """The same rows in some columns only."""
        return replace(self, blocks=blocks)

    def at(self, head: Ints, token: Ints) -> Evidence:
        """As many other rows of the call, without the engine's result; the same object for the same rows."""
        rows = head.tobytes(), token.tobytes()
        if rows not in self._others:
            request = self.case.requests_of(token)
            self._others[rows] = replace(
                self, request=request, head=head, token=token, scores=None, block_ids=None
            )
        return self._others[rows]

    def decoded(self, request: int, blocks: Ints) -> tuple[Floats, Floats]:
        """Keys ``[n, 128, 128]`` of a request's blocks by the contract, and their squared lengths.

        The last few are kept for all evidence made of this: most faults change something else.
        """
        kept, chunk = self._decoded, (request, blocks.tobytes())
        if chunk not in kept:
            keys = right_keys(self.pages[self.table[request, blocks]])
            kept[chunk] = keys, _squares(keys)
            if len(kept) > KEPT_CHUNKS:
                kept.popitem(last=False)
        return kept[chunk]


def gather_evidence(case: Case, grades: Grades, fault: int, tolerance: float) -> Evidence:
    """Sample a judged case.

    Args:
        case: with an engine's result, its keys in pages.
        grades: ``[H, total_q]``, below 0 for rows that were not judged.
        fault: the grade of a faulty row.
        tolerance: in units of ``sum_i |q_i k_i|``.
    """
    faulty_per_token = (grades == fault).any(axis=0)
    requests = _requests(case, faulty_per_token)
    in_sample = np.zeros(case.total_q, dtype=bool)
    for taken in requests:
        in_sample[case.cu_seqlens_q[taken] : case.cu_seqlens_q[taken + 1]] = True
    faulty = _spread(np.argwhere((grades == fault) & in_sample), FAULTY_ROWS)
    right = _spread(np.argwhere((grades >= 0) & (grades != fault) & in_sample), RIGHT_ROWS)
    rows = np.concatenate([faulty, right])
    is_faulty = np.arange(len(rows)) < len(faulty)
    order = np.argsort(rows[:, 1], kind="stable")  # by token, so by request
    rows, is_faulty = rows[order], is_faulty[order]
    head, token = rows[:, 0], rows[:, 1]
    record = known(case.engine)
    return Evidence(
        case=case,
        request=case.requests_of(token),
        head=head,
        token=token,
        faulty=is_faulty,
        scores=None if record.scores is None else record.scores[head, token],
        block_ids=None if record.block_ids is None else record.block_ids[head, token],
        tolerance=tolerance,
    )


def request_blocks(case: Case) -> Ints:
    """``[batch]`` blocks of each request."""
    return np.asarray(-(-case.seq_lens.astype(np.int64) // BLOCK_TOKENS))


def _requests(case: Case, faulty_per_token: Bools) -> list[int]:
    """Requests to sample: those with faults, short ones first, and up to two without."""
    blocks = request_blocks(case)
    counts = [
        int(faulty_per_token[start:end].sum())
        for start, end in zip(case.cu_seqlens_q[:-1], case.cu_seqlens_q[1:])
    ]
    with_queries = case.query_lens > 0
    shortest_first = np.argsort(blocks, kind="stable")
    faulty = [int(r) for r in shortest_first if counts[r]]
    clean = [int(r) for r in shortest_first if with_queries[r] and not counts[r]]
    taken: list[int] = []
    for request in (*faulty, *clean[-2:]):
        if not taken or blocks[[*taken, request]].sum() <= MAX_PAGES:
            taken.append(request)
    return sorted(taken)


def _spread(rows: Ints, most: int) -> Ints:
    """At most ``most`` rows, evenly spaced over tokens and heads."""
    if len(rows) <= most:
        return rows
    rows = rows[np.lexsort((rows[:, 0], rows[:, 1]))]
    chosen: Ints = np.unique(np.linspace(0, len(rows) - 1, most).round().astype(np.int64))
    return rows[chosen]


# ---- Page bytes as keys ----

PageKeys = Callable[[Bytes], Floats]
"""Pages ``[n, 9216]`` to keys ``[n, 128, 128]`` (token, dim)."""

DIMS_TO_GROUPS = np.arange(HEAD_DIM) // GROUP_DIMS


def codes_of(pages: Bytes) -> Bytes:
    """``[n, 128, 128]``, one E2M1 code a byte."""
    return unpacked(pages[:, :CODE_BYTES].reshape(-1, BLOCK_TOKENS, TOKEN_CODE_BYTES))


def unpacked(packed: Bytes) -> Bytes:
    """Codes ``[..., 128]`` of bytes ``[..., 64]``, low nibble first."""
    codes = np.empty((*packed.shape[:-1], HEAD_DIM), dtype=np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes


def scales_of(pages: Bytes) -> Bytes:
    """``[n, 128, 8]`` scale bytes."""
    return pages[:, CODE_BYTES:].reshape(-1, BLOCK_TOKENS, GROUPS)


def keys_of(codes: Bytes, scales: Bytes, groups: Ints = DIMS_TO_GROUPS) -> Floats:
    """Scored keys of codes ``[..., 128]`` and scales ``[..., 8]``; ``groups`` is each dim's scale group."""
    place = np.left_shift(scales, 4, dtype=np.uint16)[..., groups] | codes
    return np.asarray(right_table().reshape(-1).take(place), dtype=np.float32)


def right_keys(pages: Bytes) -> Floats:
    """Keys by the contract."""
    return _keys_by_pairs(pages, _right_pairs())


def keys_by_table(table: Floats) -> PageKeys:
    """Keys by another table ``[256, 16]`` of scale byte and code."""
    pairs = _pairs(table)
    return lambda pages: _keys_by_pairs(pages, pairs)


def _keys_by_pairs(pages: Bytes, pairs: NDArray[np.uint64]) -> Floats:
    packed = pages[:, :CODE_BYTES].reshape(-1, BLOCK_TOKENS, GROUPS, GROUP_DIMS // 2)
    place = np.left_shift(scales_of(pages)[..., None], 8, dtype=np.uint16) | packed
    return pairs.take(place).view(np.float32).reshape(-1, BLOCK_TOKENS, HEAD_DIM)


def _pairs(table: Floats) -> NDArray[np.uint64]:
    """``[65536]``: both values of a byte of codes under a scale byte, so one look-up decodes two."""
    byte = np.arange(256)
    both = np.stack([table[:, byte & 0x0F], table[:, byte >> 4]], axis=2).astype(np.float32)
    return np.ascontiguousarray(both).view(np.uint64).reshape(-1)


@functools.cache
def _right_pairs() -> NDArray[np.uint64]:
    return _pairs(right_table())


def scale_values(scales: Bytes) -> NDArray[np.float64]:
    """Scales as factors: NaN is 0, the sign is kept."""
    return np.nan_to_num(e4m3_values(scales), nan=0.0)


@functools.cache
def right_table() -> Floats:
    """``[256, 16]``: the scored value of a scale byte and a code."""
    magnitudes = np.abs(scale_values(np.arange(256, dtype=np.uint8)))[:, None] * E2M1_MAGNITUDES
    values = e4m3_values(e4m3_bytes(magnitudes))
    both = np.concatenate([values, -values], axis=1)
    return np.where(np.arange(256)[:, None] & 0x80, -both, both).astype(np.float32)


# ---- Scores ----

CHUNK_PAGES = 64
"""Pages dequantised at a time: 4 MiB of keys."""
KEPT_CHUNKS = 16
"""Chunks of keys by the contract that are kept, at most."""

PageOf = Callable[[Evidence, int, int], Bytes | None]
"""Evidence, request, block to the bytes ``[9216]`` read for it; None if the file does not hold them."""
Forced = Callable[[Floats, Ints, Evidence], Floats]
"""Scores ``[R, S]``, causal blocks ``[R]``, evidence to the scores with sentinels."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Scored rows.

    Attributes:
        scores: ``[R, S]``: ``-inf`` where a row sees nothing, NaN where the file does not determine the score
            or it was not computed.
        num_blocks: ``[R]`` blocks that a row selects from.
        slack: ``[R, S]`` allowed difference of sums in fp32.
    """

    scores: Floats
    num_blocks: Ints
    slack: Floats


@dataclass(frozen=True, eq=False)
class Steps:
    """How scores are computed; the defaults are the contract's.

    Attributes:
        keys: page bytes to keys.
        page_of: which bytes a block of a request is read from; the block table's page when None.
        queries: ``[R, 128]`` query of each row; the contract's when None.
        position: ``[R]`` positions, from which follow the blocks that a row sees; the contract's when None.
        last_key: ``[R]`` last key that a row sees; its position when None.
        first_absent: ``[R]`` first key that is missing, with all after it; none is when None.
        absent_is_zero: whether missing keys are read as zero, rather than left out.
        forced: forces blocks; the contract's when None.
    """

    keys: PageKeys = right_keys
    page_of: PageOf | None = None
    queries: Floats | None = None
    position: Ints | None = None
    last_key: Ints | None = None
    first_absent: Ints | None = None
    absent_is_zero: bool = False
    forced: Forced | None = None


_UNFORCED: WeakKeyDictionary[Evidence, Scored] = WeakKeyDictionary()


def score(evidence: Evidence, steps: Steps | None = None) -> Scored:
    """Score the sample's rows."""
    steps = steps or Steps()
    if _has_right_products(steps):
        if evidence not in _UNFORCED:
            _UNFORCED[evidence] = _unforced(evidence, steps)
        found = _UNFORCED[evidence]
    else:
        found = _unforced(evidence, steps)
    return replace(found, scores=(steps.forced or by_contract)(found.scores, found.num_blocks, evidence))


def _has_right_products(steps: Steps) -> bool:
    """Whether at most the forced blocks differ from the contract."""
    return all(
        getattr(steps, field.name) is field.default for field in fields(steps) if field.name != "forced"
    )


def _unforced(evidence: Evidence, steps: Steps) -> Scored:
    position = evidence.position if steps.position is None else steps.position
    last_key = position if steps.last_key is None else steps.last_key
    num_blocks = position // BLOCK_TOKENS + 1
    queries = right_queries(evidence) if steps.queries is None else steps.queries
    norms = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1)).astype(np.float32)
    columns = np.arange(evidence.num_score_blocks)
    wanted = columns if evidence.blocks is None else evidence.blocks
    shape = (len(position), evidence.num_score_blocks)
    scores: Floats = np.full(shape, np.nan, dtype=np.float32)
    slack: Floats = np.full(shape, 1e-30, dtype=np.float32)
    for request, rows, blocks in evidence.requests:
        own = wanted[wanted < blocks]
        end = int(np.searchsorted(own, num_blocks[rows].max()))
        for first in range(0, end, CHUNK_PAGES):
            whole = own[first : first + CHUNK_PAGES]
            chunk = whole[: end - first]
            known = np.ones(len(chunk), dtype=bool)
            if steps.page_of is None and steps.keys is right_keys:
                keys, squares = (values[: len(chunk)] for values in evidence.decoded(request, whole))
            else:
                pages, known = _pages(evidence, steps.page_of, request, chunk)
                keys = steps.keys(pages)
                squares = _squares(keys)
            ends = _ends(chunk, last_key[rows])
            best = _best(queries[rows], keys, chunk, steps, rows, ends)
            best[:, ~known] = np.nan
            cells = rows[:, None], chunk
            scores[cells] = best
            slack[cells] += (
                2 * evidence.tolerance * norms[rows, None] * _longest(squares, chunk, steps, rows, ends)
            )
        scores[rows, blocks:] = -np.inf
    scores[columns >= num_blocks[:, None]] = -np.inf
    return Scored(scores, num_blocks, slack)


class _Ends(NamedTuple):
    """Where rows see a block in part, and which blocks they do not see.

    Attributes:
        past: ``[rows, blocks]`` blocks past a row's last key.
        cut: rows whose last key lies in one of the blocks.
        place: the place of that block.
        unseen: ``[cut, 128]`` keys of that block past the last.
    """

    past: Bools
    cut: Ints
    place: Ints
    unseen: Bools


def _ends(blocks: Ints, last_key: Ints) -> _Ends:
    end = last_key // BLOCK_TOKENS  # the only block that a row may see in part
    place = np.searchsorted(blocks, end).clip(max=len(blocks) - 1)
    (cut,) = np.nonzero(blocks[place] == end)
    unseen = np.arange(BLOCK_TOKENS) > (last_key[cut] % BLOCK_TOKENS)[:, None]
    return _Ends(blocks > end[:, None], cut, place[cut], unseen)


def _best(queries: Floats, keys: Floats, blocks: Ints, steps: Steps, rows: Ints, ends: _Ends) -> Floats:
    """Largest product with a visible key of each of ``blocks``: ``[rows, blocks]``."""
    count = len(keys)
    with np.errstate(invalid="ignore"):
        flat: Floats = queries @ keys.reshape(-1, HEAD_DIM).T
    products: Floats = flat.reshape(len(queries), count, BLOCK_TOKENS)
    absent = np.isnan(products)
    if absent.any():
        # A NaN product never wins a maximum in hardware; the contract counts a NaN score as -inf, too.
        products[absent] = -np.inf
    products = _absent_as(np.float32(0 if steps.absent_is_zero else -np.inf), products, blocks, steps, rows)
    return _largest_seen(products, ends)


def _squares(keys: Floats) -> Floats:
    """Squared lengths of keys, NaN as 0: ``[n, 128]``."""
    squares: Floats = np.einsum("ptd,ptd->pt", keys, keys)
    squares[np.isnan(squares)] = 0
    return squares


def _longest(squares: Floats, blocks: Ints, steps: Steps, rows: Ints, ends: _Ends) -> Floats:
    """Length of the longest visible key of each of ``blocks``: ``[rows, blocks]``. Later keys may be of any
    size: they round no score."""
    seen = _largest_seen(_absent_as(np.float32(0), squares[None], blocks, steps, rows), ends)
    return np.asarray(np.sqrt(np.maximum(seen, 0)), dtype=np.float32)


def _absent_as(value: np.float32, values: Floats, blocks: Ints, steps: Steps, rows: Ints) -> Floats:
    """Values of keys ``[rows or 1, blocks, 128]``, with ``value`` for missing keys."""
    if steps.first_absent is None:
        return values
    place = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    return np.where(place >= steps.first_absent[rows][:, None, None], value, values)


def _largest_seen(values: Floats, ends: _Ends) -> Floats:
    """Largest of the values of keys ``[rows or 1, blocks, 128]`` that a row sees: ``[rows, blocks]``."""
    best: Floats = np.where(ends.past, np.float32(-np.inf), values.max(axis=2))
    of_end: Floats = values[ends.cut if len(values) == len(ends.past) else 0, ends.place]
    of_end[ends.unseen] = -np.inf
    best[ends.cut, ends.place] = of_end.max(axis=1)
    return best


def by_table(evidence: Evidence, request: int, block: int) -> Bytes | None:
    """The page of the block table."""
    page: Bytes = evidence.pages[evidence.table[request, block]]
    return page


def by_contract(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    """Init blocks, then local blocks over them."""
    return force(scores, num_blocks, evidence.case.init_blocks, evidence.case.local_blocks)


def unforced(scores: Floats, _num_blocks: Ints, _evidence: Evidence) -> Floats:
    """No sentinels."""
    return scores


def force(scores: Floats, num_blocks: Ints, init_blocks: int, local_blocks: int) -> Floats:
    """The first ``init_blocks`` and the last ``local_blocks`` of a row's blocks forced, local over init."""
    blocks, ends = np.arange(scores.shape[1]), num_blocks[:, None]
    scores = np.where((blocks < ends) & (blocks < init_blocks), np.float32(INIT_SCORE), scores)
    local = (blocks < ends) & (blocks >= ends - local_blocks)
    return np.where(local, np.float32(LOCAL_SCORE), scores)


_QUERIES: WeakKeyDictionary[Evidence, Floats] = WeakKeyDictionary()


def right_queries(evidence: Evidence) -> Floats:
    """``[R, 128]`` queries as they are scored, in E4M3."""
    if evidence not in _QUERIES:
        given = evidence.case.index_q[evidence.token, evidence.head]
        _QUERIES[evidence] = quantised(given.astype(np.float64))
    return _QUERIES[evidence]


def quantised(queries: NDArray[np.float64]) -> Floats:
    """Values after the contract's cast to E4M3."""
    return e4m3_values(e4m3_bytes(queries)).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _nothing() -> Bytes:
    return np.zeros(PAGE_BYTES, dtype=np.uint8)


def _pages(evidence: Evidence, page_of: PageOf | None, request: int, blocks: Ints) -> tuple[Bytes, Bools]:
    """Bytes of blocks ``[count, 9216]``, and whether the file holds them."""
    if page_of is None:
        return evidence.pages[evidence.table[request, blocks]], np.ones(len(blocks), dtype=bool)
    found = [page_of(evidence, request, int(block)) for block in blocks]
    known = np.array([page is not None for page in found])
    return np.stack([_nothing() if page is None else page for page in found]), known


# ---- Predictions: recorded scores and selected ids ----

IdOrder = Literal["score", "lowest score", "block", "last block", "any"]
ReadIds = Callable[[Evidence, Ids], Ids]
"""Evidence and the engine's ids ``[R, k]`` to the blocks that they mean."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What an engine with a fault records.

    Attributes:
        scores: the recorded scores.
        ranked: the scores that ids are selected by.
        topk: ids of a row, the case's when None.
        order: of a row's ids, the stated one when None.
        read_ids: the blocks that such an engine's ids mean, the ids themselves when None.
    """

    scores: Scored
    ranked: Scored
    topk: int | None = None
    order: IdOrder | None = None
    read_ids: ReadIds | None = None


def prediction_by_contract(evidence: Evidence) -> Prediction:
    """What a right engine records."""
    return by_scores(score(evidence))


def by_scores(scored: Scored) -> Prediction:
    """Ids selected by the recorded scores."""
    return Prediction(scored, scored)


def partly(where: str, moved: Scored, right: Scored) -> Prediction:
    """``moved`` in place of the right scores, ids or both: ``where`` names them."""
    return Prediction(moved if "scores" in where else right, moved if "ids" in where else right)


def by_steps(steps: Callable[[Evidence], Steps]) -> Callable[[Evidence], Prediction]:
    """Predicts from steps of the contract that a fault changes."""
    return lambda evidence: by_scores(score(evidence, steps(evidence)))


def by_keys(keys: PageKeys) -> Callable[[Evidence], Prediction]:
    """Predicts from pages decoded as other keys."""
    return by_steps(lambda _: Steps(keys=keys))


def by_page(page_of: PageOf) -> Callable[[Evidence], Prediction]:
    """Predicts from other pages read for a block."""
    return by_steps(lambda _: Steps(page_of=page_of))


def by_ids(
    read: ReadIds | None, order: IdOrder | None = None, topk: int | None = None
) -> Callable[[Evidence], Prediction]:
    """Predicts right scores, and a right selection written in another way."""

    def predict(evidence: Evidence) -> Prediction:
        right = score(evidence)
        return Prediction(right, right, topk, order, read)

    return predict
