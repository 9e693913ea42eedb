"""A row sees keys that it must not, or misses its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import (
    Evidence,
    Floats,
    Forced,
    Ints,
    Prediction,
    Steps,
    by_scores,
    by_steps,
    force,
    quantised,
    score,
    unforced,
)
from indexer.explain.match import Bools, Hypothesis, ids_agree, match, picked_blocks, score_agrees
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM

FAMILY = "causal mask"


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        Hypothesis(
            "no causal mask in the row's own block",
            FAMILY,
            "Keys after the query's position, up to the request's end, count in the block that holds it.",
            by_steps(lambda e: Steps(last_key=_own_block_end(e).clip(max=e.seq_len - 1))),
        ),
        Hypothesis(
            "no causal mask, past the request's end too",
            FAMILY,
            "The whole page that holds the query counts, with whatever lies after the request's last key.",
            by_steps(lambda e: Steps(last_key=_own_block_end(e))),
        ),
        Hypothesis(
            "no causal mask at all",
            FAMILY,
            "Every query sees all keys of its request, so blocks of its future are scored and picked.",
            by_steps(lambda e: Steps(position=e.seq_len - 1)),
        ),
        Hypothesis(
            "the query's own key is masked",
            FAMILY,
            "The mask compares with < where it must with <=.",
            by_steps(lambda e: Steps(last_key=e.position - 1)),
        ),
        Hypothesis(
            "one key too many is visible",
            FAMILY,
            "The mask lets the key right after the query's position in.",
            by_steps(lambda e: Steps(last_key=e.position + 1)),
        ),
    ]


def _own_block_end(evidence: Evidence) -> Ints:
    return evidence.position // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS - 1


# The position of a chunk's first query is wrong, and with it the mask and the local blocks of all.

CHUNK_START_FAMILY = "chunk-start offset"


def chunk_start_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    if not evidence.prefix.any():
        return []
    return [
        _starts(
            "the chunk's prefix is ignored",
            "The first query of a chunk is taken to stand at position 0.",
            lambda e: e.query,
        ),
        _starts(
            "the chunk's prefix is counted twice",
            "The prefix is added to positions that hold it already.",
            lambda e: (2 * e.prefix + e.query).clip(max=e.seq_len - 1),
        ),
        _starts(
            "the chunk's start is rounded down to a block",
            "A prefix that ends inside a block loses its last tokens.",
            lambda e: e.prefix // BLOCK_TOKENS * BLOCK_TOKENS + e.query,
        ),
        _starts(
            "the chunk's start is rounded up to a block",
            "A prefix that ends inside a block is taken for a whole number of blocks.",
            lambda e: (-(-e.prefix // BLOCK_TOKENS) * BLOCK_TOKENS + e.query).clip(max=e.seq_len - 1),
        ),
        _starts(
            "every query has the position of the chunk's first",
            "The query's own offset in the chunk is left out.",
            lambda e: e.prefix,
        ),
        _starts(
            "queries count from the batch's first",
            "The query's offset in the batch is added where its offset in the request must be.",
            lambda e: (e.prefix + e.token).clip(max=e.seq_len - 1),
        ),
    ]


def _starts(name: str, says: str, position: Callable[[Evidence], Ints]) -> Hypothesis:
    return Hypothesis(name, CHUNK_START_FAMILY, says, by_steps(lambda e: Steps(position=position(e))))


# Other numbers of init or local blocks than the call states.

SENTINEL_COUNTS_FAMILY = "sentinels"
USUAL_SHARE = 0.9
"""Share of rows that must allow a count."""
Counts = tuple[int, int]
"""Init blocks, local blocks."""


def sentinel_counts_hypotheses(evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    stated = (evidence.case.init_blocks, evidence.case.local_blocks)
    apart = {stated, (0, 0), (0, stated[1]), (stated[0], 0)}  # has a name of its own
    if evidence.scores is not None:
        return [_forces(counts, stated) for counts in sorted({_recorded(evidence)} - apart)]
    return _from_ids(evidence, narrow, stated, apart)


def _forces(counts: Counts, stated: Counts, more: str = "") -> Hypothesis:
    init, local = counts
    named = [
        f"{number} {kind} block{'s' * (number != 1)} {'are' if number != 1 else 'is'} forced, not {asked}"
        for kind, number, asked in (("init", init, stated[0]), ("local", local, stated[1]))
        if number != asked
    ]
    return Hypothesis(
        " and ".join(named),
        SENTINEL_COUNTS_FAMILY,
        f"init_blocks is {stated[0]} and local_blocks {stated[1]} in the file; the engine has {init} and "
        f"{local}{more}.",
        by_steps(lambda _: Steps(forced=lambda scores, ends, _e: force(scores, ends, init, local))),
        fitted=1,
    )


def _recorded(evidence: Evidence) -> Counts:
    """What the rows that see most have in their recorded scores."""
    if evidence.scores is None:
        raise AssertionError("only asked for with scores")
    scores = evidence.scores[:, : evidence.num_score_blocks]
    visible = np.arange(scores.shape[1]) < evidence.num_blocks[:, None]
    usual = []
    for sentinel in (INIT_SCORE, LOCAL_SCORE):
        found = ((scores == np.float32(sentinel)) & visible).sum(axis=1)[evidence.faulty]
        found = np.sort(found)
        usual.append(int(found[int(USUAL_SHARE * (len(found) - 1))]))
    return usual[0], usual[1]


def _from_ids(evidence: Evidence, narrow: Evidence, stated: Counts, apart: set[Counts]) -> list[Hypothesis]:
    """Counts that the picks of most rows allow; of those that give the same, the least."""
    if evidence.block_ids is None:
        return []
    topk = evidence.block_ids.shape[1]
    picked = picked_blocks(evidence.block_ids, evidence.num_score_blocks)
    most_init = _allowed(_run(picked, evidence.num_blocks), topk)
    from_end = np.zeros_like(picked)
    at = evidence.num_blocks[:, None] - 1 - np.arange(picked.shape[1])
    from_end = np.where(at >= 0, np.take_along_axis(picked, at.clip(min=0), axis=1), False)
    most_local = _allowed(_run(from_end, evidence.num_blocks), topk)
    found: list[Hypothesis] = []
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
            more = (
                "" if len(alike) == 1 else f", or up to {alike[-1][0]} and {alike[-1][1]}: the ids are alike"
            )
            found.append(_forces(alike[0], stated, more))
    return found


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


# Forced blocks: left out, in the wrong order, or at the wrong end.

SENTINELS_FAMILY = "sentinels"


def sentinels_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    case = evidence.case
    found = []
    if case.init_blocks or case.local_blocks:
        found.append(
            _sentinels_forces(
                "forced blocks are not forced", "Init and local blocks keep their own scores.", unforced
            )
        )
        if evidence.scores is not None and evidence.block_ids is not None:
            found.append(
                Hypothesis(
                    "forced blocks are put into the selection only",
                    SENTINELS_FAMILY,
                    "The ids are right; init and local blocks keep their own scores.",
                    _in_the_selection,
                )
            )
    if case.init_blocks and case.local_blocks:
        found += [
            _sentinels_forces(
                "init wins over local",
                "A block that is both first and last gets the init sentinel; it must get the local one.",
                _init_over_local,
            ),
            _sentinels_forces(
                "init blocks are not forced", "Only the local sentinel is written.", _local_only
            ),
            _sentinels_forces(
                "local blocks are not forced", "Only the init sentinel is written.", _init_only
            ),
            _sentinels_forces(
                "init and local sentinels are exchanged",
                "Init blocks get 1e29 and local blocks 1e30.",
                _exchanged,
            ),
        ]
    if case.local_blocks:
        found += [
            _sentinels_forces(
                "local blocks count from the request's end",
                "The last blocks of the request are forced, not those of the row's own position.",
                _from_the_end,
            ),
        ]
    return found


def _in_the_selection(evidence: Evidence) -> Prediction:
    return Prediction(score(evidence, Steps(forced=unforced)), score(evidence))


def _sentinels_forces(name: str, says: str, forced: Forced) -> Hypothesis:
    return Hypothesis(name, SENTINELS_FAMILY, says, by_steps(lambda _: Steps(forced=forced)))


def _init_only(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    return force(scores, num_blocks, evidence.case.init_blocks, 0)


def _local_only(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    return force(scores, num_blocks, 0, evidence.case.local_blocks)


def _init_over_local(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    return _init_only(_local_only(scores, num_blocks, evidence), num_blocks, evidence)


def _exchanged(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    right = force(scores, num_blocks, evidence.case.init_blocks, evidence.case.local_blocks)
    init, local = np.float32(INIT_SCORE), np.float32(LOCAL_SCORE)
    return np.where(right == init, local, np.where(right == local, init, right))


def _from_the_end(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    ends = -(-evidence.seq_len // BLOCK_TOKENS)[:, None]
    blocks = np.arange(scores.shape[1])
    scores = _init_only(scores, num_blocks, evidence)
    local = (blocks < num_blocks[:, None]) & (blocks >= ends - evidence.case.local_blocks)
    return np.where(local, np.float32(LOCAL_SCORE), scores)


# Rows that are those of another token, all by the same distance.

SHIFT_FAMILY = "head/token layout"
MAX_SHIFT = 64
"""Tokens."""
FITTED_ROWS = 3
"""Faulty rows that a distance is looked for in."""
Shifted = Callable[[Evidence, Ints], Prediction]
"""Evidence and tokens ``[R]`` of the call to what its rows would hold."""


def token_shift_hypotheses(_evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    total = narrow.case.total_q
    if total == 1:
        return []
    found = []
    kinds: list[tuple[str, str, Shifted]] = [
        ("results", "Row t holds what row t {0} must hold: the outputs start at another row.", _results),
        ("queries", "Row t is scored with the query of row t {0}, at its own position.", _queries),
    ]
    for what, says, shifted in kinds:
        shift = _shift(narrow, shifted)
        if shift:
            rows = f"{abs(shift)} row{'s' * (abs(shift) > 1)}"
            found.append(
                Hypothesis(
                    f"{what} are those of {rows} {'later' if shift > 0 else 'earlier'}",
                    SHIFT_FAMILY,
                    says.format(f"{'+' if shift > 0 else '-'} {abs(shift)}"),
                    lambda e, shift=shift, shifted=shifted: shifted(  # type: ignore[misc]
                        e, (e.token + shift) % e.case.total_q
                    ),
                    fitted=1,
                )
            )
    return found


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


# The queries: read in another layout, or not in E4M3.


def queries_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = []
    case = evidence.case
    if case.num_heads > 1:
        found += [
            Hypothesis(
                "queries are read head-major",
                "head/token layout",
                "index_q is [token, head, 128] and is read as if it were [head, token, 128].",
                by_steps(_head_major),
            ),
            Hypothesis(
                "every head is scored with head 0's queries",
                "head/token layout",
                "The head is left out of the query's address.",
                by_steps(_head_zero),
            ),
        ]
    if case.index_q.dtype.itemsize > 1:
        found.append(
            Hypothesis(
                "queries are not cast to E4M3",
                "saturation and rounding",
                "Scores are made from the queries as they come, not from their E4M3 values.",
                by_steps(_as_they_come),
            )
        )
    return found


def _head_major(evidence: Evidence) -> Steps:
    case = evidence.case
    rows = case.index_q.reshape(-1, HEAD_DIM)[evidence.head * case.total_q + evidence.token]
    return Steps(queries=quantised(rows.astype(np.float64)))


def _head_zero(evidence: Evidence) -> Steps:
    return Steps(queries=quantised(evidence.case.index_q[evidence.token, 0].astype(np.float64)))


def _as_they_come(evidence: Evidence) -> Steps:
    return Steps(queries=evidence.case.index_q[evidence.token, evidence.head].astype(np.float32))


# A head's result in another head's place.

HEADS_FAMILY = "head/token layout"


def heads_hypotheses(_evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    heads = narrow.case.num_heads
    if heads == 1:
        return []
    own = np.arange(heads)
    sources = {where: _sources(narrow, where) for where in _heads_recorded(narrow)}
    found = []
    if len(sources) == 1:
        ((where, source),) = sources.items()
        # Of ids or scores alone, head 0's for all is what "scored with head 0's queries" gives.
        if (source != own).any() and source.any():
            found.append(_holds(where, source))
    elif (sources["scores"] == sources["ids"]).all():
        if (sources["ids"] != own).any() and sources["ids"].any():
            found.append(_holds("ids and scores", sources["ids"]))
    else:
        found += [_holds(where, source) for where, source in sources.items() if (source != own).any()]
    return found


def _heads_recorded(evidence: Evidence) -> list[str]:
    recorded = {"scores": evidence.scores, "ids": evidence.block_ids}
    return [where for where, values in recorded.items() if values is not None]


def _sources(evidence: Evidence, where: str) -> NDArray[np.int64]:
    """``[H]``: whose result each head has; its own where others agree no better."""
    heads = evidence.case.num_heads
    votes = np.zeros((heads, heads))
    for source in range(heads):
        moved = by_scores(score(evidence.at(np.full_like(evidence.head, source), evidence.token)))
        if where == "ids":
            agrees: Bools = ids_agree(moved, evidence)
        else:
            visible = np.arange(evidence.num_score_blocks) < evidence.num_blocks[:, None]
            agrees = np.asarray((score_agrees(moved, evidence) | ~visible).all(axis=1))
        votes[:, source] = np.bincount(evidence.head, agrees, heads)
    votes += 0.5 * np.eye(heads)
    found: NDArray[np.int64] = votes.argmax(axis=1)
    return found


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
    return Hypothesis(name, HEADS_FAMILY, says, lambda e: _moved(e, where, source), fitted=1)


def _moved(evidence: Evidence, where: str, source: Ints) -> Prediction:
    moved = score(evidence.at(source[evidence.head], evidence.token))
    right = score(evidence)
    return Prediction(moved if "scores" in where else right, moved if "ids" in where else right)
