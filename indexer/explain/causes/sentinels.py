"""Forced blocks: left out, in the wrong order, or at the wrong end."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence, Floats, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Prediction, by_steps
from indexer.explain.replica import Forced, Steps, force, score, unforced
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS

FAMILY = "sentinels"


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    case = evidence.case
    found = []
    if case.init_blocks or case.local_blocks:
        found.append(
            _forces("forced blocks are not forced", "Init and local blocks keep their own scores.", unforced)
        )
        if evidence.scores is not None and evidence.block_ids is not None:
            found.append(
                Hypothesis(
                    "forced blocks are put into the selection only",
                    FAMILY,
                    "The ids are right; init and local blocks keep their own scores.",
                    _in_the_selection,
                )
            )
    if case.init_blocks and case.local_blocks:
        found += [
            _forces(
                "init wins over local",
                "A block that is both first and last gets the init sentinel; it must get the local one.",
                _init_over_local,
            ),
            _forces("init blocks are not forced", "Only the local sentinel is written.", _local_only),
            _forces("local blocks are not forced", "Only the init sentinel is written.", _init_only),
            _forces(
                "init and local sentinels are exchanged",
                "Init blocks get 1e29 and local blocks 1e30.",
                _exchanged,
            ),
        ]
    if case.local_blocks:
        found += [
            _forces(
                "local blocks count from the request's end",
                "The last blocks of the request are forced, not those of the row's own position.",
                _from_the_end,
            ),
        ]
    return found


def _in_the_selection(evidence: Evidence) -> Prediction:
    return Prediction(score(evidence, Steps(forced=unforced)), score(evidence))


def _forces(name: str, says: str, forced: Forced) -> Hypothesis:
    return Hypothesis(name, FAMILY, says, by_steps(lambda _: Steps(forced=forced)))


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
