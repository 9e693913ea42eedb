"""The engine on the device's thread: a scorer, its sequences by owner, and cases. Numpy in and out.

It is checked against the oracle before the first request. The server's state holds it once it passed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from starlette.requests import Request

from indexer import IndexScorer
from indexer.case import Case
from indexer.case.container import Array
from indexer.pipeline import ScoreResult
from indexer.replay import CaseScorer, as_tensor
from indexer.verify import Answer, judge, selftest_case
from indexer.wire import ScoreReply, SequencesCall
from kernel.backends.base import Order
from kernel.contract import BLOCK_TOKENS, SUPPORTED_HEADS
from kernel.errors import IndexerError, InvalidArgumentError, RankLostError, UnknownSequenceError
from server.limits import MAX_FLOP_CPU, MAX_FLOP_GPU, CallLimits, ScoreOptions, check_sequences
from server.metrics import Metrics
from server.problems import ProblemError, of_error
from server.ranks import LeadingScorer
from server.score_map import CallRecord, record_call
from server.settings import Settings
from server.worker import Worker

WARMING = "the backend is being prepared and checked against the oracle"
"""What a server says until it is ready."""
_ID_BYTES = 8
"""Random bytes of a sequence's id: it cannot be guessed, and does not come back after a restart."""
_SCORER_NAME = re.compile(r"^([qk])\b")
"""A scorer's tensor arguments, which are ``index_q`` and ``index_k`` on the wire."""
_SELF_TEST_OWNER = "self-test"


# ---- Sequences ----


@dataclass(frozen=True)
class LiveSequence:
    """A sequence as of the last call that finished."""

    id: str
    scorer_id: int
    length: int  # tokens
    last_keys: bytes = b""
    """Digest of the last append's keys, if it had a ``start``: tells a repeated one from another writer's."""


class SequenceTable:
    """Live sequences by owner. Changed on the device's thread only; entries are replaced, never altered, so
    the event loop may read at any time.

    Args:
        settings: with the limits of sequences and keys.

    Attributes:
        count: live sequences of all owners.
    """

    def __init__(self, settings: Settings) -> None:
        self.count = 0
        self._settings = settings
        self._by_owner: dict[str, dict[str, LiveSequence]] = {}
        self._keys: dict[str, int] = {}
        self._used: dict[str, float] = {}

    def check_room(self, owner: str, *, sequences: int = 0, keys: int = 0) -> None:
        """Refuses new sequences or keys beyond the limits of an owner or the server.

        Raises:
            ProblemError: 409.
        """
        own = len(self._by_owner.get(owner, {}))
        held = self._keys.get(owner, 0)
        for kind, argument, value, asked in (
            ("too-many-sequences", "max_sequences", self.count, sequences),
            ("too-many-sequences", "max_sequences_per_token", own, sequences),
            ("too-many-keys", "max_keys_per_token", held, keys),
        ):
            limit = getattr(self._settings, argument)
            if limit is not None and asked and value + asked > limit:
                raise ProblemError(
                    409,
                    kind,
                    f"{argument} = {limit}: {value} are live and {asked} would be added; delete some "
                    "sequences, or raise the limit",
                    argument=argument,
                    value=value + asked,
                    limit=limit,
                )

    def get(self, owner: str, sequence: str) -> LiveSequence:
        """Returns a sequence of this owner.

        Raises:
            UnknownSequenceError: the owner has none of that id, whatever others have.
        """
        found = self._by_owner.get(owner, {}).get(sequence)
        if found is None:
            raise UnknownSequenceError(sequence)
        return found

    def use(self, owner: str, sequence: str) -> LiveSequence:
        """As :meth:`get`, and keeps the sequence from expiring."""
        found = self.get(owner, sequence)
        self._used[sequence] = time.monotonic()
        return found

    def idle(self, before: float) -> list[tuple[str, LiveSequence]]:
        """Returns the sequences that no call used since ``before``, each with its owner."""
        return [
            (owner, sequence)
            for owner, sequences in self._by_owner.items()
            for sequence in sequences.values()
            if self._used[sequence.id] <= before
        ]

    def of_owner(self, owner: str) -> list[LiveSequence]:
        """Returns an owner's sequences, oldest first."""
        return list(self._by_owner.get(owner, {}).values())

    def add(self, owner: str, scorer_id: int, length: int) -> LiveSequence:
        """Gives a new sequence of the scorer to an owner."""
        sequence = LiveSequence(secrets.token_hex(_ID_BYTES), scorer_id, length)
        self._used[sequence.id] = time.monotonic()
        self._by_owner.setdefault(owner, {})[sequence.id] = sequence
        self._keys[owner] = self._keys.get(owner, 0) + length
        self.count += 1
        return sequence

    def grow(self, owner: str, sequence: LiveSequence, length: int, last_keys: bytes) -> LiveSequence:
        """Records a sequence's new length, and the digest of the keys that were appended."""
        grown = replace(sequence, length=length, last_keys=last_keys)
        self._by_owner[owner][sequence.id] = grown
        self._keys[owner] += length - sequence.length
        return grown

    def remove(self, owner: str, sequence: LiveSequence) -> None:
        """Forgets a sequence."""
        del self._by_owner[owner][sequence.id]
        del self._used[sequence.id]
        self._keys[owner] -= sequence.length
        self.count -= 1


# ---- Engine ----


@contextmanager
def wire_names() -> Iterator[None]:
    """Makes errors of the scorer name tensors as the request does."""
    try:
        yield
    except InvalidArgumentError as error:
        argument = _SCORER_NAME.sub(r"index_\1", error.argument)
        if argument == error.argument:
            raise
        raise InvalidArgumentError(argument, error.value, error.limit, error.remedy) from error


class Engine:
    """One scorer, its sequences by owner, and a scorer of cases on the same backend.

    A call that raises changes nothing: each changes the scorer by one operation, which is all or nothing, and
    then the table.

    Args:
        settings: the server's.

    Raises:
        InvalidArgumentError: the device has no room for the pages.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(self, settings: Settings) -> None:
        config, ranks = settings.indexer_config(), settings.context_parallel
        seconds = settings.rank_seconds
        self.scorer = IndexScorer(config) if ranks == 1 else LeadingScorer(config, ranks, seconds)
        self.cases = CaseScorer(self.scorer)
        self.sequences = SequenceTable(settings)
        self.records: dict[str, CallRecord] = {}
        max_flop = MAX_FLOP_CPU if self.scorer.device.type == "cpu" else MAX_FLOP_GPU
        self.limits = CallLimits(settings.max_call_bytes, settings.max_call_flop or max_flop)

    @property
    def lost(self) -> RankLostError | None:
        """Why no call is possible any more; None as long as every rank is alive."""
        return self.scorer.lost if isinstance(self.scorer, LeadingScorer) else None

    def close(self) -> None:
        """Ends the other ranks, if there are any."""
        if isinstance(self.scorer, LeadingScorer):
            self.scorer.close()

    def score_case(self, owner: str, case: Case, options: ScoreOptions) -> ScoreReply:
        """Scores a case without a check of its size; touches no sequence."""
        selection = self._selection(options)
        result = self.cases.score(case, **selection)
        return self._reply(owner, "/v1/score", result, selection["order"])

    def score_sequences(self, owner: str, call: SequencesCall, options: ScoreOptions) -> ScoreReply:
        """Scores a ragged batch over some of an owner's sequences."""
        began = time.perf_counter()
        found = [self.sequences.use(owner, sequence) for sequence in call.sequences]
        check_sequences(
            self.scorer.config.num_index_heads,
            call.index_q.shape[0],
            [sequence.length for sequence in found],
            call.query_lens,
            self.limits,
            scores=options.scores,
        )
        selection = self._selection(options)
        query = as_tensor(call.index_q).to(self.scorer.device)
        transfer = time.perf_counter() - began
        with wire_names():
            ids = [sequence.scorer_id for sequence in found]
            result = self.scorer.score(query, ids, call.query_lens, timings=True, **selection)
        reply = self._reply(owner, "/v1/sequences/score", result, selection["order"])
        return replace(reply, timings={"transfer": transfer, **reply.timings})

    def add(self, owner: str) -> LiveSequence:
        """Makes an empty sequence."""
        self.sequences.check_room(owner, sequences=1)
        return self.sequences.add(owner, self.scorer.add_sequence(), 0)

    def append(self, owner: str, sequence: str, keys: Array, start: int | None) -> LiveSequence:
        """Appends keys, if the sequence holds ``start`` tokens or ``start`` is None.

        If these same keys were the last that were appended, at ``start``, nothing is left to do.
        """
        found = self.sequences.use(owner, sequence)
        digest = b"" if start is None else _digest(keys)
        if start is not None and start != found.length:
            if start + keys.shape[0] == found.length and digest == found.last_keys:
                return found
            raise ProblemError(
                409,
                "length-conflict",
                f"start = {start}: the sequence holds {found.length} tokens, and other keys were appended "
                "last; nothing was appended",
                argument="start",
                value=start,
                length=found.length,
            )
        self.sequences.check_room(owner, keys=keys.shape[0])
        with wire_names():
            self.scorer.append_keys(found.scorer_id, as_tensor(keys).to(self.scorer.device))
        return self.sequences.grow(owner, found, found.length + keys.shape[0], digest)

    def fork(self, owner: str, sequence: str) -> LiveSequence:
        """Makes a sequence with the same keys."""
        found = self.sequences.use(owner, sequence)
        self.sequences.check_room(owner, sequences=1, keys=found.length)
        return self.sequences.add(owner, self.scorer.fork_sequence(found.scorer_id), found.length)

    def remove(self, owner: str, sequence: str) -> None:
        """Drops a sequence."""
        found = self.sequences.get(owner, sequence)
        self.scorer.free_sequence(found.scorer_id)
        self.sequences.remove(owner, found)

    def expire(self, before: float) -> int:
        """Drops the sequences that no call used since ``before`` (monotonic time); returns their number."""
        idle = self.sequences.idle(before)
        for owner, sequence in idle:
            self.remove(owner, sequence.id)
        return len(idle)

    def forget(self, owners: Iterable[str]) -> None:
        """Drops everything of some owners, whose tokens are gone."""
        for owner in owners:
            for sequence in self.sequences.of_owner(owner):
                self.remove(owner, sequence.id)
            self.records.pop(owner, None)

    def _selection(self, options: ScoreOptions) -> dict[str, Any]:
        """Returns the options as arguments of a scorer."""
        return {
            "topk": options.topk,
            "init_blocks": options.init_blocks,
            "local_blocks": options.local_blocks,
            "order": options.order or self.scorer.config.order,
            "return_scores": options.scores,
        }

    def _reply(self, owner: str, route: str, result: ScoreResult, order: Order) -> ScoreReply:
        block_ids = result.block_ids.cpu().numpy()
        heads, total_q, topk = block_ids.shape
        reply = ScoreReply(
            block_ids=block_ids,
            num_blocks=result.num_blocks.cpu().numpy(),
            scores=None if result.scores is None else result.scores.cpu().numpy(),
            backend=result.backend,
            precision=result.precision,
            order=order,
            timings=dict(result.timings),
        )
        title = f"{route}: {heads} heads, {total_q} queries, top {topk}"
        self.records[owner] = record_call(title, reply)
        return reply


def _digest(keys: Array) -> bytes:
    found = hashlib.sha256(str(keys.dtype).encode())
    found.update(np.ascontiguousarray(keys).view(np.uint8).data)
    return found.digest()


# ---- Self-test ----


class SelfTestError(IndexerError):
    """The backend does not compute what the oracle does on this machine."""


def prepared_engine(settings: Settings) -> Engine:
    """Returns an engine that passed its self-test.

    Raises:
        SelfTestError: it did not.
        InvalidArgumentError: the device has no room for the pages.
        BackendUnavailableError: the backend cannot run here.
    """
    engine = Engine(settings)
    for num_heads in SUPPORTED_HEADS:
        _check_case(engine, selftest_case(num_heads))
    _check_case(engine, replace(selftest_case(1), init_blocks=1, local_blocks=2))
    _check_sequence(engine)
    engine.records.clear()
    return engine


def _check_case(engine: Engine, case: Case) -> None:
    reply = engine.score_case(_SELF_TEST_OWNER, case, ScoreOptions(order="score"))
    selected = engine.score_case(_SELF_TEST_OWNER, case, ScoreOptions(order="score", scores=False))
    if reply.scores is None:
        raise AssertionError("scores were asked for")
    answer = Answer(
        scores=reply.scores,
        block_ids=reply.block_ids,
        num_blocks=reply.num_blocks,
        backend=reply.backend,
        precision=engine.scorer.config.precision,
    )
    found = judge(case, _SELF_TEST_OWNER, answer, 0.0)
    if not found.ok or not np.array_equal(selected.block_ids, reply.block_ids):
        others = int((selected.block_ids != reply.block_ids).any(axis=2).sum())
        raise SelfTestError(
            f"backend {found.backend} with {case.num_heads} heads: score error {found.max_score_error:.3g} "
            f"of the allowed {found.score_tolerance:.3g}, {found.topk_mismatches} wrong selections of "
            f"{case.rows}, without scores {others} others"
        )


def _check_sequence(engine: Engine) -> None:
    """Compares the scores of a sequence, appended in two parts, with those of a case bit for bit."""
    scorer = engine.scorer
    heads, tokens = scorer.config.num_index_heads, min(300, scorer.config.num_pages * BLOCK_TOKENS)
    case = selftest_case(heads)
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
    want = engine.score_case(_SELF_TEST_OWNER, single, ScoreOptions())
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


# ---- State ----


@dataclass
class ServerState:
    """What the routes of one server share.

    Attributes:
        engine: None until the self-test passed.
        failed: whether the warm-up failed; the server then ends.
        end: ends the server.
        started: ``time.monotonic()`` when it was made.
    """

    settings: Settings
    worker: Worker
    metrics: Metrics
    engine: Engine | None = None
    failed: bool = False
    end: Callable[[], None] = lambda: None
    started: float = field(default_factory=time.monotonic)

    def ready_engine(self) -> Engine:
        """Returns the engine.

        Raises:
            ProblemError: 503, warming up, shutting down, or a rank of the scorer ended.
        """
        if self.worker.stopping:
            detail = "the server is being shut down; nothing was done"
            raise ProblemError(503, "stopping", detail, {"Retry-After": "1"})
        if self.engine is None:
            raise ProblemError(503, "warming", f"{WARMING}; nothing was done", {"Retry-After": "1"})
        if self.engine.lost is not None:
            raise of_error(self.engine.lost)
        return self.engine


def state_of(request: Request) -> ServerState:
    """Returns the state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
