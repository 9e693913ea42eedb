"""Faults in what a row is: its position, its query, its forced blocks, its place among heads and tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import (
    Evidence,
    Forced,
    Prediction,
    Steps,
    by_scores,
    by_steps,
    force,
    partly,
    quantised,
    request_blocks,
    score,
    unforced,
)
from indexer.explain.match import Family, Hypothesis, Predict, as_is, ids_agree, match, score_agrees
from indexer.explain.verdict import Bools, Floats, Ints, picked_blocks
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM

# ---- A row sees keys that it must not, or misses its own ----

CAUSAL_MASK = Family("causal mask", by_steps)


def _own_block_end(evidence: Evidence) -> Ints:
    return evidence.position // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS - 1


CAUSAL_MASK.add(
    "no causal mask in the row's own block",
    "Keys after the query's position, up to the request's end, count in the block that holds it.",
    lambda e: Steps(last_key=_own_block_end(e).clip(max=e.seq_len - 1)),
)
CAUSAL_MASK.add(
    "no causal mask, past the request's end too",
    "The whole page that holds the query counts, with whatever lies after the request's last key.",
    lambda e: Steps(last_key=_own_block_end(e)),
)
CAUSAL_MASK.add(
    "no causal mask at all",
    "Every query sees all keys of its request, so blocks of its future are scored and picked.",
    lambda e: Steps(position=e.seq_len - 1),
)
CAUSAL_MASK.add(
    "the query's own key is masked",
    "The mask compares with < where it must with <=.",
    lambda e: Steps(last_key=e.position - 1),
)
CAUSAL_MASK.add(
    "one key too many is visible",
    "The mask lets the key right after the query's position in.",
    lambda e: Steps(last_key=e.position + 1),
)

# ---- A chunk starts at a wrong position: so do the mask and the local blocks of all its queries ----

CHUNK_START: Family[Callable[[Evidence], Ints]] = Family(
    "chunk-start offset",
    lambda position: by_steps(lambda e: Steps(position=position(e).clip(max=e.seq_len - 1))),
    when=lambda e: bool(e.prefix.any()),
)
CHUNK_START.add(
    "the chunk's prefix is ignored",
    "The first query of a chunk is taken to stand at position 0.",
    lambda e: e.query,
)
CHUNK_START.add(
    "the chunk's prefix is counted twice",
    "The prefix is added to positions that hold it already.",
    lambda e: 2 * e.prefix + e.query,
)
CHUNK_START.add(
    "the chunk's start is rounded down to a block",
    "A prefix that ends inside a block loses its last tokens.",
    lambda e: e.prefix // BLOCK_TOKENS * BLOCK_TOKENS + e.query,
)
CHUNK_START.add(
    "the chunk's start is rounded up to a block",
    "A prefix that ends inside a block is taken for a whole number of blocks.",
    lambda e: -(-e.prefix // BLOCK_TOKENS) * BLOCK_TOKENS + e.query,
)
CHUNK_START.add(
    "every query has the position of the chunk's first",
    "The query's own offset in the chunk is left out.",
    lambda e: e.prefix,
)
CHUNK_START.add(
    "queries count from the batch's first",
    "The query's offset in the batch is added where its offset in the request must be.",
    lambda e: e.prefix + e.token,
)

# ---- Forced blocks: left out, in the wrong order, or at the wrong end ----


def _by_forced(forced: Forced) -> Predict:
    return by_steps(lambda _: Steps(forced=forced))


def _forces_any(evidence: Evidence) -> bool:
    return bool(evidence.case.init_blocks or evidence.case.local_blocks)


def _forces_both(evidence: Evidence) -> bool:
    return bool(evidence.case.init_blocks and evidence.case.local_blocks)


SENTINELS = Family("sentinels", _by_forced)
SENTINELS.add(
    "forced blocks are not forced", "Init and local blocks keep their own scores.", unforced, _forces_any
)


@SENTINELS.generator
def _in_the_selection(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    if _forces_any(evidence) and evidence.scores is not None and evidence.block_ids is not None:
        yield Hypothesis(
            "forced blocks are put into the selection only",
            SENTINELS.name,
            "The ids are right; init and local blocks keep their own scores.",
            lambda e: Prediction(score(e, Steps(forced=unforced)), score(e)),
        )


@SENTINELS.cause(
    "init wins over local",
    "A block that is both first and last gets the init sentinel; it must get the local one.",
    _forces_both,
)
def _init_over_local(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    return _init_only(_local_only(scores, num_blocks, evidence), num_blocks, evidence)


@SENTINELS.cause("init blocks are not forced", "Only the local sentinel is written.", _forces_both)
def _local_only(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    return force(scores, num_blocks, 0, evidence.case.local_blocks)


@SENTINELS.cause("local blocks are not forced", "Only the init sentinel is written.", _forces_both)
def _init_only(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    return force(scores, num_blocks, evidence.case.init_blocks, 0)


@SENTINELS.cause(
    "init and local sentinels are exchanged", "Init blocks get 1e29 and local blocks 1e30.", _forces_both
)
def _sentinels_exchanged(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    right = force(scores, num_blocks, evidence.case.init_blocks, evidence.case.local_blocks)
    init, local = np.float32(INIT_SCORE), np.float32(LOCAL_SCORE)
    return np.where(right == init, local, np.where(right == local, init, right))


@SENTINELS.cause(
    "local blocks count from the request's end",
    "The last blocks of the request are forced, not those of the row's own position.",
    lambda e: bool(e.case.local_blocks),
)
def _local_from_the_end(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    ends = request_blocks(evidence.case)[evidence.request][:, None]
    blocks = np.arange(scores.shape[1])
    scores = _init_only(scores, num_blocks, evidence)
    local = (blocks < num_blocks[:, None]) & (blocks >= ends - evidence.case.local_blocks)
    return np.where(local, np.float32(LOCAL_SCORE), scores)


# ---- Other numbers of init or local blocks than the call states ----

SENTINEL_COUNTS = Family("sentinels", _by_forced)
USUAL_SHARE = 0.9
"""Share of rows that must allow a count."""
Counts = tuple[int, int]
"""Init blocks, local blocks."""


@SENTINEL_COUNTS.generator
def _counts(evidence: Evidence, narrow: Evidence) -> Iterator[Hypothesis]:
    stated = (evidence.case.init_blocks, evidence.case.local_blocks)
    apart = {stated, (0, 0), (0, stated[1]), (stated[0], 0)}  # has a name of its own
    if evidence.scores is not None:
        yield from (_forces(counts, stated) for counts in sorted({_recorded_counts(evidence)} - apart))
    elif evidence.block_ids is not None:
        yield from _counts_from_ids(evidence, narrow, stated, apart)


def _forces(counts: Counts, stated: Counts, more: str = "") -> Hypothesis:
    init, local = counts
    named = [
        f"{number} {kind} block{'s' * (number != 1)} {'are' if number != 1 else 'is'} forced, not {asked}"
        for kind, number, asked in (("init", init, stated[0]), ("local", local, stated[1]))
        if number != asked
    ]
    return SENTINEL_COUNTS.hypothesis(
        " and ".join(named),
        f"init_blocks is {stated[0]} and local_blocks {stated[1]} in the file; the engine has {init} and "
        f"{local}{more}.",
        lambda scores, ends, _e: force(scores, ends, init, local),
        fitted=1,
    )


def _recorded_counts(evidence: Evidence) -> Counts:
    """How many of each sentinel the rows that see most have in their recorded scores."""
    usual = []
    for sentinel in (INIT_SCORE, LOCAL_SCORE):
        found = ((evidence.recorded == np.float32(sentinel)) & evidence.visible).sum(axis=1)
        found = np.sort(found[evidence.faulty])
        usual.append(int(found[int(USUAL_SHARE * (len(found) - 1))]))
    return usual[0], usual[1]


def _counts_from_ids(
    evidence: Evidence, narrow: Evidence, stated: Counts, apart: set[Counts]
) -> Iterator[Hypothesis]:
    """Counts that the picks of most rows allow; of those that give the same, the least."""
    topk = evidence.ids.shape[1]
    picked = picked_blocks(evidence.ids, evidence.num_score_blocks)
    most_init = _allowed(_run(picked, evidence.num_blocks), topk)
    at = evidence.num_blocks[:, None] - 1 - np.arange(picked.shape[1])
    from_end = np.where(at >= 0, np.take_along_axis(picked, at.clip(min=0), axis=1), False)
    most_local = _allowed(_run(from_end, evidence.num_blocks), topk)
    named: set[Counts] = set()
    locals_tried = [*range(1, most_local + 1), *_more_than_k(picked, evidence.num_blocks, stated[0], topk)]
    for tried in (
        [(stated[0], local) for local in locals_tried],
        [(init, stated[1]) for init in range(1, most_init + 1)],
        # What fills all places from both ends never looked at scores: that is no number of forced blocks.
        [(most_init, most_local)] if most_init + most_local < topk else [],
    ):
        fits = {counts: _explains(counts, stated, narrow) for counts in tried if counts not in apart}
        best = max(fits.values(), default=0)
        alike = [counts for counts in tried if best and fits.get(counts) == best]
        if alike and alike[0] not in named:
            named.add(alike[0])
            most = alike[-1]
            more = "" if len(alike) == 1 else f", or up to {most[0]} and {most[1]}: the ids are alike"
            yield _forces(alike[0], stated, more)


def _run(picked: Bools, num_blocks: Ints) -> Ints:
    """``[R]`` blocks that are picked one after another from the first on; many where all are."""
    run = np.logical_and.accumulate(picked, axis=1).sum(axis=1)
    return np.where(run >= num_blocks, np.iinfo(np.int64).max, run)


def _more_than_k(picked: Bools, num_blocks: Ints, init_blocks: int, topk: int) -> list[int]:
    """Where most rows pick k blocks in a row that start as far from their end: of more forced blocks than k,
    the first win. That all are forced would allow any pick, so the run itself is asked for, and not the one
    from the first block on, which equal scores give."""
    own = np.where(np.arange(picked.shape[1]) >= init_blocks, picked, False)
    first, count = own.argmax(axis=1), own.sum(axis=1)
    in_a_row = own.shape[1] - 1 - own[:, ::-1].argmax(axis=1) - first == count - 1
    in_a_row &= (count > 0) & (first > init_blocks)
    distances, rows = np.unique((num_blocks - first)[in_a_row], return_counts=True)
    if not len(distances) or rows.max() < 0.5 * len(own):
        return []
    usual = int(distances[rows.argmax()])
    return [usual] if usual > topk else []


def _allowed(run: Ints, topk: int) -> int:
    """The largest count that most rows allow, at most k."""
    ordered = np.sort(run)
    return int(min(topk, ordered[int((1 - USUAL_SHARE) * (len(ordered) - 1))]))


def _explains(counts: Counts, stated: Counts, narrow: Evidence) -> int:
    rows = match(_forces(counts, stated).predict(narrow), narrow).rows
    return int(rows[narrow.faulty].sum()) and int(rows.sum())


# ---- The queries: read in another layout, or not in E4M3 ----


def _by_queries(queries: Callable[[Evidence], Floats]) -> Predict:
    return by_steps(lambda e: Steps(queries=queries(e)))


QUERY_LAYOUT = Family("head/token layout", _by_queries, when=lambda e: e.case.num_heads > 1)
QUERY_CAST = Family("saturation and rounding", _by_queries)


@QUERY_LAYOUT.cause(
    "queries are read head-major",
    "index_q is [token, head, 128] and is read as if it were [head, token, 128].",
)
def _head_major(evidence: Evidence) -> Floats:
    rows = evidence.case.index_q.reshape(-1, HEAD_DIM)
    return quantised(rows[evidence.head * evidence.case.total_q + evidence.token].astype(np.float64))


@QUERY_LAYOUT.cause(
    "every head is scored with head 0's queries", "The head is left out of the query's address."
)
def _head_zero(evidence: Evidence) -> Floats:
    return quantised(evidence.case.index_q[evidence.token, 0].astype(np.float64))


@QUERY_CAST.cause(
    "queries are not cast to E4M3",
    "Scores are made from the queries as they come, not from their E4M3 values.",
    lambda e: e.case.index_q.dtype.itemsize > 1,
)
def _not_cast(evidence: Evidence) -> Floats:
    return evidence.case.index_q[evidence.token, evidence.head].astype(np.float32)


# ---- The queries: rotated without the keys ----

ROTATION = Family("query rotation", _by_queries)


@functools.cache
def _hadamard() -> NDArray[np.float64]:
    """``[128, 128]``, orthonormal: the transform's matrix in Sylvester's order."""
    matrix = np.ones((1, 1))
    while len(matrix) < HEAD_DIM:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(HEAD_DIM))


def _rotated(evidence: Evidence) -> NDArray[np.float64]:
    given = evidence.case.index_q[evidence.token, evidence.head]
    return np.asarray(given.astype(np.float64) @ _hadamard())


@ROTATION.cause(
    "queries are rotated, keys are not",
    "A Hadamard transform is applied to the queries alone; products keep their value only if keys have it, "
    "too.",
)
def _rotated_once(evidence: Evidence) -> Floats:
    return quantised(_rotated(evidence))


@ROTATION.cause(
    "queries are rotated in 16 bits, keys are not",
    "A Hadamard transform is applied to the queries alone and rounded to their own type; products keep "
    "their value only if keys have it, too.",
    lambda e: e.case.index_q.dtype.itemsize == 2,
)
def _rotated_in_16_bits(evidence: Evidence) -> Floats:
    return quantised(_rotated(evidence).astype(evidence.case.index_q.dtype).astype(np.float64))


# ---- A head's result in another head's place ----


HEADS = Family("head/token layout", as_is, when=lambda e: e.case.num_heads > 1)


@HEADS.generator
def _heads(evidence: Evidence, narrow: Evidence) -> Iterator[Hypothesis]:
    own = np.arange(evidence.case.num_heads)
    recorded = {"scores": evidence.scores, "ids": evidence.block_ids}
    sources = {where: _sources(narrow, where) for where, values in recorded.items() if values is not None}
    first, last = next(iter(sources.values())), next(reversed(sources.values()))
    if (first == last).all():
        # Head 0's result for all is what "scored with head 0's queries" gives.
        if (first != own).any() and first.any():
            yield _holds(" and ".join(reversed(sources)), first)
        return
    for where, source in sources.items():
        if (source != own).any():
            yield _holds(where, source)


def _sources(evidence: Evidence, where: str) -> Ints:
    """``[H]``: whose result each head has; its own where others agree no better."""
    heads = evidence.case.num_heads
    votes = np.zeros((heads, heads))
    for source in range(heads):
        moved = by_scores(score(evidence.at(np.full_like(evidence.head, source), evidence.token)))
        if where == "ids":
            agrees = ids_agree(moved, evidence)
        else:
            agrees = np.asarray((score_agrees(moved, evidence) | ~evidence.visible).all(axis=1))
        votes[:, source] = np.bincount(evidence.head, agrees, heads)
    return np.asarray((votes + 0.5 * np.eye(heads)).argmax(axis=1))


def _holds(where: str, source: Ints) -> Hypothesis:
    heads = ", ".join(str(head) for head in source)
    if len(set(source.tolist())) == len(source):
        name = f"heads are permuted: {where} of heads 0 to {len(source) - 1} are those of {heads}"
        says = "Each head's result stands in another head's place: the order of the heads, or of the ranks."
    elif len(set(source.tolist())) == 1:
        name = f"every head has head {source[0]}'s {where}"
        says = f"One head's {where} are written for all heads, or the head is left out of an address."
    else:
        name = f"heads are mixed up: {where} of heads 0 to {len(source) - 1} are those of {heads}"
        says = "Some heads have another head's result, and some heads' results are nowhere."

    def predict(evidence: Evidence) -> Prediction:
        return partly(where, score(evidence.at(source[evidence.head], evidence.token)), score(evidence))

    return HEADS.hypothesis(name, says, predict, fitted=1)


# ---- Rows that are those of another token, all by the same distance ----

Shifted = Callable[[Evidence, Ints], Prediction]
"""Evidence and tokens ``[R]`` of the call to what its rows would hold."""
TOKEN_SHIFT = Family("head/token layout", as_is, when=lambda e: e.case.total_q > 1)
MAX_SHIFT = 64
"""Tokens."""
FITTED_ROWS = 3
"""Faulty rows that a distance is looked for in."""


@TOKEN_SHIFT.generator
def _shifts(_evidence: Evidence, narrow: Evidence) -> Iterator[Hypothesis]:
    kinds: tuple[tuple[str, str, Shifted], ...] = (
        ("results", "Row t holds what row t {0} must hold: the outputs start at another row.", _results),
        ("queries", "Row t is scored with the query of row t {0}, at its own position.", _queries),
    )
    for what, says, shifted in kinds:
        shift = _shift(narrow, shifted)
        if shift:
            rows = f"{abs(shift)} row{'s' * (abs(shift) > 1)}"
            yield TOKEN_SHIFT.hypothesis(
                f"{what} are those of {rows} {'later' if shift > 0 else 'earlier'}",
                says.format(f"{'+' if shift > 0 else '-'} {abs(shift)}"),
                lambda e, shift=shift, shifted=shifted: shifted(e, (e.token + shift) % e.case.total_q),  # type: ignore[misc]
                fitted=1,
            )


def _shift(evidence: Evidence, shifted: Shifted) -> int:
    """The distance that most of a few faulty rows agree with; 0 if none does."""
    faulty = np.flatnonzero(evidence.faulty)
    rows = np.unique(faulty[np.linspace(0, len(faulty) - 1, FITTED_ROWS).round().astype(np.int64)])
    most = min(MAX_SHIFT, evidence.case.total_q - 1)
    shifts = np.array([shift for shift in range(-most, most + 1) if shift])
    many = evidence.subset(np.repeat(rows, len(shifts)))
    agrees = match(shifted(many, (many.token + np.tile(shifts, len(rows))) % evidence.case.total_q), many)
    votes = agrees.rows.reshape(len(rows), -1).sum(axis=0)
    nearest = np.lexsort((np.abs(shifts), -votes))[0]
    return int(shifts[nearest]) if votes[nearest] else 0


def _results(evidence: Evidence, token: Ints) -> Prediction:
    return by_scores(score(evidence.at(evidence.head, token)))


def _queries(evidence: Evidence, token: Ints) -> Prediction:
    queries = quantised(evidence.case.index_q[token, evidence.head].astype(np.float64))
    return by_scores(score(evidence, Steps(queries=queries)))
