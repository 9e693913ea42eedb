"""What runs on the device's thread: the scorer with its sequences, and cases beside it. Numpy in and out."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from indexer import IndexScorer
from indexer.case import Case
from indexer.case_scorer import CaseScorer
from indexer.replay import as_tensor
from indexer.result import ScoreResult
from indexer.wire import KeysBody, ScoreReply, SequencesCall
from kernel.backends.base import Order
from kernel.errors import InvalidArgumentError, RankLostError
from server.limits import MAX_FLOP_CPU, MAX_FLOP_GPU, CallLimits, check_sequences
from server.options import ScoreOptions
from server.problems import ProblemError
from server.ranks import LeadingScorer
from server.score_map import CallRecord, record_call
from server.sequences import LiveSequence, SequenceTable
from server.settings import Settings

_NAME = re.compile(r"\w+")
_WIRE_NAMES = {"q": "index_q", "k": "index_k"}
"""What tensors are called on the wire, by their names in the scorer's arguments."""


@contextmanager
def wire_names() -> Iterator[None]:
    """Let errors of the scorer name tensors as the request does."""
    try:
        yield
    except InvalidArgumentError as error:
        name = _NAME.match(error.argument)
        wire_name = _WIRE_NAMES.get(name[0]) if name else None
        if name is None or wire_name is None:
            raise
        rest = error.argument[name.end() :]
        raise InvalidArgumentError(wire_name + rest, error.value, error.limit, error.remedy) from error


def _scorer(settings: Settings) -> IndexScorer:
    config, ranks = settings.indexer_config(), settings.context_parallel
    return IndexScorer(config) if ranks == 1 else LeadingScorer(config, ranks, settings.rank_seconds)


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
        self.scorer = _scorer(settings)
        self.cases = CaseScorer(self.scorer)
        self.sequences = SequenceTable(
            settings.max_sequences, settings.max_sequences_per_token, settings.max_keys_per_token
        )
        self.records: dict[str, CallRecord] = {}
        max_flop = MAX_FLOP_CPU if self.scorer.device.type == "cpu" else MAX_FLOP_GPU
        self.limits = CallLimits(settings.max_call_bytes, settings.max_call_flop or max_flop)

    @property
    def lost(self) -> RankLostError | None:
        """Why no call can be made any more; None as long as every rank is there."""
        return self.scorer.lost if isinstance(self.scorer, LeadingScorer) else None

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if isinstance(self.scorer, LeadingScorer):
            self.scorer.close()

    def score_case(self, owner: str, case: Case, options: ScoreOptions) -> ScoreReply:
        """Score a case, whatever it takes; touches no sequence."""
        order = options.order or self.scorer.config.order
        result = self.cases.score(
            case,
            topk=options.topk,
            init_blocks=options.init_blocks,
            local_blocks=options.local_blocks,
            order=order,
            return_scores=options.scores,
        )
        return self._reply(owner, "/v1/score", result, order)

    def score_sequences(self, owner: str, call: SequencesCall, options: ScoreOptions) -> ScoreReply:
        """Score a ragged batch over some of an owner's sequences."""
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
        order = options.order or self.scorer.config.order
        query = as_tensor(call.index_q).to(self.scorer.device)
        transfer = time.perf_counter() - began
        with wire_names():
            result = self.scorer.score(
                query,
                [sequence.scorer_id for sequence in found],
                None if call.query_lens is None else list(call.query_lens),
                return_scores=options.scores,
                topk=options.topk,
                init_blocks=options.init_blocks,
                local_blocks=options.local_blocks,
                order=order,
            )
        reply = self._reply(owner, "/v1/sequences/score", result, order)
        return replace(reply, timings={"transfer": transfer, **reply.timings})

    def add(self, owner: str) -> LiveSequence:
        """Make an empty sequence."""
        self.sequences.check_room(owner, sequences=1)
        return self.sequences.add(owner, self.scorer.add_sequence(), 0)

    def append(self, owner: str, sequence: str, body: KeysBody, start: int | None) -> LiveSequence:
        """Append keys, if the sequence holds ``start`` tokens or ``start`` is None."""
        found = self.sequences.use(owner, sequence)
        if start is not None and start != found.length:
            raise ProblemError(
                409,
                "length-conflict",
                f"start = {start}: the sequence holds {found.length} tokens; nothing was appended. After a "
                "lost answer this tells whether the keys arrived",
                argument="start",
                value=start,
                length=found.length,
            )
        keys = body.index_k
        self.sequences.check_room(owner, keys=keys.shape[0])
        with wire_names():
            self.scorer.append_keys(found.scorer_id, as_tensor(keys).to(self.scorer.device))
        return self.sequences.grow(owner, found, found.length + keys.shape[0])

    def fork(self, owner: str, sequence: str) -> LiveSequence:
        """Make a sequence with the same keys."""
        found = self.sequences.use(owner, sequence)
        self.sequences.check_room(owner, sequences=1, keys=found.length)
        return self.sequences.add(owner, self.scorer.fork_sequence(found.scorer_id), found.length)

    def remove(self, owner: str, sequence: str) -> None:
        """Drop a sequence."""
        found = self.sequences.get(owner, sequence)
        self.scorer.free_sequence(found.scorer_id)
        self.sequences.remove(owner, found)

    def expire(self, seconds: float) -> int:
        """Drop the sequences that no call used for so long; how many there were."""
        idle = self.sequences.idle(seconds)
        for owner, sequence in idle:
            self.scorer.free_sequence(sequence.scorer_id)
            self.sequences.remove(owner, sequence)
        return len(idle)

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
