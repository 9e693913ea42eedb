"""The scorer of a process group: every rank holds some blocks of every sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from indexer.cache import check_room
from indexer.config import IndexerConfig
from indexer.distributed.ranks import Agreement, RankGroup
from indexer.distributed.share import (
    HeldRequest,
    SharePiece,
    ShareScorer,
    Stripe,
    best_candidates,
    merge_candidates,
    merge_scores,
    write_share,
)
from indexer.pipeline import ScoreOptions, ScoreResult, StageTimes, allocate_scores
from indexer.plan import IndexPlan
from indexer.scorer import KEY_DTYPES, IndexScorer, append_lens, check_truncation, untraced
from kernel.arguments import as_int, check_int
from kernel.backends.base import Backend, Order
from kernel.batch import Request
from kernel.checks import check_finite, check_heads, check_tensor
from kernel.contract import HEAD_DIM
from kernel.errors import InvalidArgumentError, RankLostError, UnknownSequenceError
from kernel.page import blocks_of
from kernel.step import uploaded

# ---- How heads and context are divided among ranks ----


@dataclass(frozen=True)
class Division:
    """A rank's place: rank ``group * context_ranks + context_rank`` of ``head_groups * context_ranks``."""

    head_groups: int
    context_ranks: int
    """Ranks that the blocks of a sequence go round, in every head group."""
    context_rank: int
    heads: slice
    """Index heads that this rank scores."""

    @property
    def ranks(self) -> int:
        """Ranks of all head groups."""
        return self.head_groups * self.context_ranks

    @classmethod
    def of(cls, rank: int, ranks: int, num_heads: int, head_groups: int) -> Division:
        """The place of a rank.

        Raises:
            InvalidArgumentError: ``head_groups`` does not divide the heads or the ranks.
        """
        groups = check_int("head_groups", head_groups)
        for name, value in (("num_index_heads", num_heads), ("the number of ranks", ranks)):
            if groups < 1 or value % groups:
                raise InvalidArgumentError(
                    "head_groups", groups, f"must divide {name}, {value}", "use 1 to divide the context only"
                )
        heads = check_heads(num_heads // groups)
        group, context_rank = divmod(rank, ranks // groups)
        return cls(groups, ranks // groups, context_rank, slice(group * heads, (group + 1) * heads))

    def stripe(self, first_rank: int) -> Stripe:
        """What this rank holds of a sequence whose block 0 lies on context rank ``first_rank``."""
        return Stripe((self.context_rank - first_rank) % self.context_ranks, self.context_ranks)


# ---- The two answers of a call: block ids alone, or all scores. Each has one message and one merge. ----
#
# Both are prepared before the ranks agree about the call, with the memory they need, so that every rank hears
# of a refusal. Then each rank sends its payload to all others and merges what it received.


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's share of a call.

    Attributes:
        backend: selects.
        scorer: scores this rank's blocks.
        division: this rank's place.
        q: ``[total_q, heads, 128]`` float8_e4m3fn of its heads.
        requests: with what it holds.
        num_blocks: ``[total_q]`` int32, ``nb`` of every query token.
        num_score_blocks: blocks of the longest request, ``S``.
        options: of the call.
        times: the call's stages.
    """

    backend: Backend
    scorer: ShareScorer
    division: Division
    q: torch.Tensor
    requests: Sequence[HeldRequest]
    num_blocks: torch.Tensor
    num_score_blocks: int
    options: ScoreOptions
    times: StageTimes

    def pieces(self) -> Iterator[SharePiece]:
        """Scores of this rank's blocks, see :meth:`indexer.distributed.share.ShareScorer.pieces`."""
        return self.scorer.pieces(self.q, self.requests, self.options)


class Answer(Protocol):
    """A call whose share of this rank is scored."""

    payload: torch.Tensor
    """What this rank tells all others: of one shape and dtype on all ranks."""
    gathered: torch.Tensor
    """Room for every rank's payload, ``[ranks, *payload.shape]``."""

    def merged(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns block ids ``[H, total_q, k]`` int32 and scores ``[H, total_q, S]`` float32 of all ranks."""
        ...


class BlockIds:
    """The best blocks of every row. Adds the stages ``select`` and ``merge``."""

    def __init__(self, share: Share) -> None:
        self._share = share
        division = share.division
        with share.times.stage("select"):
            shape = (share.q.shape[1], share.q.shape[0], share.options.topk)
            self.payload = best_candidates(share.backend, share.pieces(), shape, division.context_ranks)
        device = share.backend.device
        self.gathered = torch.empty((division.ranks, *shape), dtype=torch.int64, device=device)

    def merged(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Answer`."""
        share = self._share
        with share.times.stage("merge"):
            return merge_candidates(self.gathered, share.division.head_groups, share.options.order), None


class Scores:
    """The scores of every row, and the selection from them. Adds ``score``, ``merge`` and ``topk``."""

    def __init__(self, share: Share) -> None:
        self._share = share
        division, device = share.division, share.backend.device
        total_q, heads = share.q.shape[:2]
        columns = -(-share.num_score_blocks // division.context_ranks)
        all_heads = heads * division.head_groups
        self._scores = allocate_scores((all_heads, total_q, share.num_score_blocks), device)
        shape = (all_heads, total_q, share.options.topk)
        self._block_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.payload = allocate_scores((heads, total_q, columns), device)
        gathered = allocate_scores((division.ranks * heads, total_q, columns), device)
        self.gathered = gathered.view(division.ranks, heads, total_q, columns)
        with share.times.stage("score"):
            write_share(share.pieces(), self.payload)

    def merged(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Answer`."""
        share = self._share
        division = share.division
        with share.times.stage("merge"):
            shares = self.gathered.view(division.head_groups, division.context_ranks, *self.payload.shape)
            merge_scores(shares, share.requests, self._scores)
        with share.times.stage("topk"):
            share.backend.topk(self._scores, share.num_blocks, self._block_ids, share.options.order)
        return self._block_ids, self._scores


_PROTOCOL = 3
"""Raised with every change of what ranks send each other."""
_AGREED = tuple(field.name for field in fields(IndexerConfig) if field.name != "device")
"""Fields of the configuration that are the same on all ranks."""


@dataclass(frozen=True)
class _Striped:
    """A sequence over all ranks."""

    length: int = 0
    first_rank: int = 0
    """Context rank of block 0; chosen when the first key comes."""


class DistributedIndexScorer(IndexScorer):
    """An :class:`IndexScorer` whose pages and work are spread over the ranks of a process group.

    Every rank makes the same calls with the same arguments, as tensor parallel engines do, and every rank
    gets the same result: the bytes that one scorer with all pages gives. Blocks go round the context ranks:
    each holds, quantises and scores every n-th block of each sequence. An append sends no key, as each rank
    is given all and keeps its own. A call sends what :mod:`indexer.distributed.ranks` says.

    ``pages``, ``block_table`` and ``score_paged`` are of this rank alone; ``score_paged`` talks to no other.

    In two dimensions, the ranks are ``head_groups`` groups one after another, each of which holds all blocks
    and scores some of the heads: rank ``group * context_ranks + context_rank``, the order of
    ``init_device_mesh(..., (head_groups, context_ranks))``.

    A call that raises leaves every rank as it was. A rank that refuses a call, makes another one or is in
    another state makes the call raise on all ranks; a rank that ends, or does not answer by the deadline,
    makes it and all later ones raise.

    Args:
        config: as of an :class:`IndexScorer`, the same on all ranks; ``num_index_heads`` are those of all
            head groups, ``num_pages`` the pages of each rank, ``device`` that of this rank.
        group: the ranks; the default group when None. See :class:`indexer.distributed.ranks.RankGroup`.
        head_groups: groups of ranks that share the heads out: divides ``num_index_heads`` and the ranks.
        deadline_seconds: time that the slowest rank may take longer than this one for a call.

    Raises:
        InvalidArgumentError: as :class:`IndexScorer`; there is no process group, or it cannot be so divided.
        BackendUnavailableError: the backend cannot run here.
        RankDisagreementError: ranks are configured differently, or one refuses its configuration.
        RankLostError: a rank did not come.
    """

    def __init__(
        self,
        config: IndexerConfig,
        group: dist.ProcessGroup | None = None,
        *,
        head_groups: int = 1,
        deadline_seconds: float = 30.0,
    ) -> None:
        self._ranks = RankGroup(group, deadline_seconds)
        facts = {
            "protocol version": _PROTOCOL,
            **{name: getattr(config, name, None) for name in _AGREED},
            "ranks": self._ranks.size,
            "head_groups": head_groups,
            "deadline_seconds": deadline_seconds,
        }
        self._agreement = Agreement(self._ranks, facts, lambda: self._cache.allocator.num_free)
        self._striped: dict[int, _Striped] = {}
        with self._agreement.settled("construct", changes=True):
            super().__init__(config)
            heads = self.config.num_index_heads
            self._division = Division.of(self._ranks.rank, self._ranks.size, heads, head_groups)
            self._share = ShareScorer(self._backend, self.pages, self._lut)
            facts["backend"] = self.backend  # "auto" may be another one on each rank
        self._ranks.connect(self.device)

    @property
    def context_ranks(self) -> int:
        """Ranks that the blocks of a sequence go round."""
        return self._division.context_ranks

    @property
    def lost(self) -> RankLostError | None:
        """Why no call can be made any more; None as long as all ranks answer."""
        return self._ranks.lost

    @property
    def num_pages(self) -> int:
        """Pages of the context ranks together."""
        return self.context_ranks * super().num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, on the context ranks together, after the last call."""
        return sum(self._agreement.free_pages[: self.context_ranks])

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to all others together."""
        return self._ranks.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received from all others together."""
        return self._ranks.bytes_received

    def sequence_length(self, seq: int) -> int:
        """Tokens of a sequence on all ranks.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        return self._striped_of(seq).length

    @untraced
    def add_sequence(self) -> int:
        """Make an empty sequence and return its id, the same on all ranks. Ids are never used twice.

        Raises:
            RankError: see the class.
        """
        with self._turn(), ExitStack() as undo:
            with self._agreement.settled("add_sequence", changes=True):
                seq = undo.enter_context(self._cache.adding())
            self._striped[seq] = _Striped()
            return seq

    @untraced
    def append_keys(
        self, seq: int | Sequence[int], k: torch.Tensor, lens: Sequence[int] | None = None
    ) -> None:
        """Quantise those of the keys that lie in this rank's blocks and append them; see the base class.

        Args:
            seq: a live sequence, or a list of several.
            k: ``[n, 128]``, the same on all ranks.
            lens: keys of each of several sequences.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: ``k`` is not such a tensor, or makes a sequence too long.
            OutOfPagesError: a rank has too few free pages; says how many the worst off of them is missing.
            RankError: see the class.
        """
        with self._turn(), ExitStack() as undo:
            with self._agreement.settled("append_keys", changes=True) as statement:
                check_tensor("k", k, dtypes=KEY_DTYPES, shape=(None, HEAD_DIM), device=self.device)
                seqs = list(seq) if isinstance(seq, (list, tuple)) else [cast("int", seq)]
                before = [self._striped_of(one) for one in seqs]
                added = append_lens(seqs, lens, k.shape[0])
                statement.says([int(one) for one in seqs], added, k.dtype)
                for row, (striped, count) in enumerate(zip(before, added)):
                    check_room(striped.length, count, "k.shape[0]" if len(seqs) == 1 else f"lens[{row}]")
                check_finite("k", k)
                after = self._appended(before, added)
                held = [
                    self._division.stripe(new.first_rank).tokens(old.length, new.length).numpy()
                    for old, new in zip(before, after)
                ]
                own = k
                if self.context_ranks > 1 and held:
                    own = k[uploaded([np.flatnonzero(np.concatenate(held))], k.device)[0]]
                undo.enter_context(self._cache.appending(seqs, [int(one.sum()) for one in held], own))
            for one, new in zip(seqs, after):
                self._striped[int(one)] = new

    @untraced
    def truncate_sequence(self, seq: int, length: int) -> None:
        """Drop the last keys of a sequence on all ranks; see the base class.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: ``length`` is more than its tokens.
            OutOfPagesError: a copy of a shared page is needed and a rank has no free page.
            RankError: see the class.
        """
        with self._turn(), ExitStack() as undo:
            with self._agreement.settled("truncate_sequence", changes=True) as statement:
                striped = self._striped_of(seq)
                length = check_truncation(seq, length, striped.length)
                statement.says(int(seq), length)
                own = int(self._division.stripe(striped.first_rank).tokens(0, length).sum())
                statement.freed_pages = self._cache.own_pages(seq, blocks_of(own))
                undo.enter_context(self._cache.truncating(seq, own))
            self._striped[int(seq)] = _Striped(length, striped.first_rank)

    def plan(self, *arguments: Any, **options: Any) -> IndexPlan:
        """Plan a step of this rank alone, on pages that the caller owns; see the base class.

        Raises:
            InvalidArgumentError: ``sequences`` are given: they are spread over the ranks.
        """
        if options.get("sequences") is not None:
            raise InvalidArgumentError(
                "sequences", options["sequences"], "are spread over the ranks", "call score() on all ranks"
            )
        return super().plan(*arguments, **options)

    @untraced
    def fork_sequence(self, seq: int) -> int:
        """Make a sequence with the same keys and return its id; see the base class.

        Raises:
            UnknownSequenceError: not a live sequence.
            RankError: see the class.
        """
        with self._turn(), ExitStack() as undo:
            with self._agreement.settled("fork_sequence", changes=True) as statement:
                striped = self._striped_of(seq)
                statement.says(int(seq))
                fork = undo.enter_context(self._cache.forking(seq))
            self._striped[fork] = striped
            return fork

    @untraced
    def free_sequence(self, seq: int) -> None:
        """Drop a sequence once all ranks agree to; see the base class.

        Raises:
            UnknownSequenceError: not a live sequence.
            RankError: see the class.
        """
        with self._turn():
            with self._agreement.settled("free_sequence", changes=True) as statement:
                self._striped_of(seq)
                statement.says(int(seq))
                statement.freed_pages = self._cache.own_pages(seq)
            del self._striped[int(seq)]
            self._cache.free(seq)

    @untraced
    def score(
        self,
        q: torch.Tensor,
        sequences: Sequence[int],
        query_lens: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        *,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
        timings: bool = False,
    ) -> ScoreResult:
        """Score and select as the base class does, with the same result on every rank.

        Without scores the ranks send each other the best blocks of every row; with scores, all of them.

        Args:
            q: ``[total_q, H, 128]``, the same on all ranks, of all heads.
            sequences: live sequences.
            query_lens: queries of each.
            return_scores: whether to give the scores back.
            topk: blocks to select.
            init_blocks: blocks forced at a row's start.
            local_blocks: blocks forced at a row's end.
            order: order of the block ids.
            timings: whether to measure the stages of the call.

        Raises:
            UnknownSequenceError: one of them is not live.
            InvalidArgumentError: an argument is outside the contract, or the scores do not fit in memory.
            RankError: see the class.
        """
        with self._turn():
            times = StageTimes(self.device, measured=timings)
            with self._agreement.settled("score", changes=False) as statement:
                with times.stage("check"):
                    options = self._options(return_scores, topk, init_blocks, local_blocks, order)
                    lengths = self._lengths(q, sequences, query_lens)
                    requests = lengths.requests()
                    lens = [request.query_len for request in requests]
                    *selected_by, scored = astuple(options)
                    statement.says([int(seq) for seq in sequences], lens, q.dtype, *selected_by)
                    statement.says(scored)
                    held = [self._held(*pair) for pair in zip(requests, sequences)]
                    (num_blocks,) = uploaded([lengths.blocks_per_query(q.shape[0])], self.device)
                share = Share(
                    backend=self._backend,
                    scorer=self._share,
                    division=self._division,
                    q=self._quantized(q[:, self._division.heads], times),
                    requests=held,
                    num_blocks=num_blocks,
                    num_score_blocks=lengths.max_blocks,
                    options=options,
                    times=times,
                )
                answer: Answer = Scores(share) if return_scores else BlockIds(share)
            with times.stage("exchange"):
                self._ranks.gather(answer.payload, answer.gathered)
            block_ids, scores = answer.merged()
            return ScoreResult(
                block_ids=block_ids,
                scores=scores,
                num_blocks=num_blocks,
                backend=self._backend.name,
                precision=self._backend.precision,
                timings=times,
            )

    def _striped_of(self, seq: int) -> _Striped:
        number = as_int(seq)
        found = None if number is None else self._striped.get(number)
        if found is None:
            raise UnknownSequenceError(seq)
        return found

    def _appended(self, before: Sequence[_Striped], added: Sequence[int]) -> list[_Striped]:
        """Sequences with more tokens. New ones begin on the ranks that then have the most free pages."""
        ranks = self.context_ranks
        free, after = list(self._agreement.free_pages[:ranks]), []
        for old, count in zip(before, added):
            first = old.first_rank if old.length else free.index(max(free))
            after.append(_Striped(old.length + count, first))
            for block in range(blocks_of(old.length), blocks_of(old.length + count)):
                free[(first + block) % ranks] -= 1
        return after

    def _held(self, request: Request, seq: int) -> HeldRequest:
        first_rank = self._striped_of(seq).first_rank
        stripe = self._division.stripe(first_rank)
        return HeldRequest(request, first_rank, stripe, self._cache.block_table(seq))
