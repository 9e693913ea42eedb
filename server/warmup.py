"""Prepares the backend and checks it against the oracle before anyone is served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from indexer.answer_errors import mismatched_rows, score_error
from indexer.case import Case
from indexer.oracle import run_oracle
from indexer.replay import as_tensor
from kernel.backends.base import SCORE_TOLERANCE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, SUPPORTED_HEADS
from kernel.errors import IndexerError
from server.engine import Engine
from server.options import ScoreOptions
from server.settings import Settings

_LENGTHS = ((260, 19), (0, 0), (129, 1), (650, 2))
"""(keys, queries): prefill and decode, a request without either, more blocks than are selected."""
_TOPK = 3
_OWNER = "self-test"


class SelfTestError(IndexerError):
    """The backend does not compute what the oracle does on this machine."""


def prepared_engine(settings: Settings) -> Engine:
    """An engine that passed its self-test.

    Raises:
        SelfTestError: it did not.
        InvalidArgumentError: the device has no room for the pages.
        BackendUnavailableError: the backend cannot run here.
    """
    engine = Engine(settings)
    for num_heads in SUPPORTED_HEADS:
        _check_case(engine, _case(num_heads))
    _check_case(engine, replace(_case(1), init_blocks=1, local_blocks=2))
    _check_sequence(engine)
    engine.records.clear()
    return engine


def _case(num_heads: int) -> Case:
    generator = np.random.default_rng(num_heads)
    total_q, total_k = (sum(lengths) for lengths in zip(*((q, k) for k, q in _LENGTHS)))
    return Case(
        index_q=generator.standard_normal((total_q, num_heads, HEAD_DIM), dtype=np.float32),
        index_k=generator.standard_normal((total_k, HEAD_DIM), dtype=np.float32),
        cu_seqlens_q=np.cumsum([0, *(queries for _, queries in _LENGTHS)], dtype=np.int32),
        seq_lens=np.array([keys for keys, _ in _LENGTHS], dtype=np.int32),
        init_blocks=0,
        local_blocks=0,
        topk=_TOPK,
    )


def _check_case(engine: Engine, case: Case) -> None:
    reply = engine.score_case(_OWNER, case, ScoreOptions(order="score"))
    selected = engine.score_case(_OWNER, case, ScoreOptions(order="score", scores=False))
    if reply.scores is None:
        raise AssertionError("scores were asked for")
    tolerance = SCORE_TOLERANCE[engine.scorer.config.precision]
    oracle = run_oracle(case)
    error = score_error(reply.scores, oracle.scores, oracle.bounds)
    mismatches = mismatched_rows(case, reply.scores, reply.block_ids, oracle, tolerance)
    if error > tolerance or mismatches or not np.array_equal(selected.block_ids, reply.block_ids):
        raise SelfTestError(
            f"backend {engine.scorer.backend} with {case.num_heads} heads: score error {error:.3g} of the "
            f"allowed {tolerance:.3g}, {mismatches} wrong selections of {case.rows}, without scores "
            f"{int((selected.block_ids != reply.block_ids).any(axis=2).sum())} others"
        )


def _check_sequence(engine: Engine) -> None:
    """Pages of the scorer's own cache, appended in two parts, give the bits that a case gives."""
    scorer = engine.scorer
    heads, tokens = scorer.config.num_index_heads, min(300, scorer.config.num_pages * BLOCK_TOKENS)
    case = _case(heads)
    keys, queries = case.index_k, case.index_q[:1]
    if keys is None:
        raise AssertionError("the case has keys")
    single = Case(
        index_q=queries,
        index_k=keys[:tokens],
        cu_seqlens_q=np.array([0, 1], dtype=np.int32),
        seq_lens=np.array([tokens], dtype=np.int32),
        local_blocks=0,
    )
    want = engine.score_case(_OWNER, single, ScoreOptions())
    sequence = scorer.add_sequence()
    try:
        for part in (keys[: tokens // 2], keys[tokens // 2 : tokens]):
            scorer.append_keys(sequence, as_tensor(part).to(scorer.device))
        query = as_tensor(queries).to(scorer.device)
        got = scorer.score(query, [sequence], init_blocks=0, local_blocks=0)
    finally:
        scorer.free_sequence(sequence)
    if got.scores is None or want.scores is None:
        raise AssertionError("scores were asked for")
    if not torch.equal(got.scores.cpu(), torch.from_numpy(want.scores)):
        raise SelfTestError(f"backend {scorer.backend}: a sequence scores otherwise than a case of its keys")
