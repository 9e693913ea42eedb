"""A rank's share of a call: the scores of the blocks it holds, by any backend, and the merge of all shares.

A sequence's blocks go round the context ranks: block ``b`` lies on rank ``(first_rank + b) % ranks``. So a
rank holds ``phase, phase + ranks, phase + 2 * ranks, ...``, its share grows with the context to within one
block of every other's, and of the blocks it holds only the last one can be partial: one after another they
are a sequence of their own.

A backend scores contiguous blocks of causal rows, but a rank holds every n-th block. So a request is cut into
chunks of query tokens, and for a chunk whose positions lie in the blocks ``first`` to ``last`` the backend is
given a virtual request:

    blocks held below ``first``, one after another | the blocks first .. last, held or not

Its rows keep their places in the last of these, so they are consecutive, and each sees as much of every block
as it does in the whole sequence; a row's score of a block is the same number wherever the block lies. For a
block that is not held any page will do, as its column is thrown away. The columns of blocks that are held are
then moved together, which makes column ``i`` the block ``stripe.block(i)``, and forced blocks are written, by
their true ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.pipeline import ScoreOptions
from kernel.backends.base import Backend, Order
from kernel.backends.cpu.topk import ABSENT, best, pack_blocks, unpack
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS
from kernel.errors import InvalidArgumentError

CHUNK_TOKENS = 1024
"""Query tokens of a chunk. The at most nine blocks it lies in are scored by every rank."""
PIECE_CELLS = 1 << 26
"""Score cells of a piece: 256 MiB."""


@dataclass(frozen=True)
class Stripe:
    """The blocks ``phase + step * i`` of a sequence: those that one rank holds, ``i`` its column."""

    phase: int
    """The first of them, below ``step``."""
    step: int
    """Ranks that the blocks go round."""

    def block(self, column: int) -> int:
        """The block of a column."""
        return self.phase + self.step * column

    def count(self, blocks: int) -> int:
        """How many of the first ``blocks`` blocks are held: the columns of blocks below ``blocks``."""
        return -((self.phase - blocks) // self.step) if blocks > self.phase else 0

    def tokens(self, start: int, end: int) -> torch.Tensor:
        """Which of the tokens ``start`` to ``end - 1`` lie in held blocks: ``[end - start]`` bool, host."""
        positions = torch.arange(start, end, dtype=torch.int64, device="cpu")
        return positions // BLOCK_TOKENS % self.step == self.phase


@dataclass(frozen=True)
class HeldRequest:
    """A request, and what a rank holds of its sequence."""

    request: Request
    first_rank: int
    """Context rank of block 0."""
    stripe: Stripe
    pages: array[int]
    """The page of each block held."""


@dataclass(frozen=True, eq=False)
class SharePiece:
    """Scores of some consecutive query tokens, of the blocks held: column ``i`` is ``stripe.block(i)``.

    Attributes:
        tokens: the tokens' places in ``q``.
        scores: ``[H, tokens, columns]`` float32, sentinels in, -inf wherever a row sees no block.
        phases: ``[tokens]`` int64, the phase of each token's stripe.
        num_blocks: ``[tokens]`` int64, ``nb`` of each token.
    """

    tokens: slice
    scores: torch.Tensor
    phases: torch.Tensor
    num_blocks: torch.Tensor


class ShareScorer:
    """Scores a rank's blocks.

    Args:
        backend: scores them.
        pages: ``[num_pages, 9216]`` uint8 of the rank.
        lut: ``[256, 8]`` uint8.
    """

    def __init__(self, backend: Backend, pages: torch.Tensor, lut: torch.Tensor) -> None:
        self._backend = backend
        self._pages = pages
        self._lut = lut

    def pieces(
        self, q: torch.Tensor, requests: Sequence[HeldRequest], options: ScoreOptions
    ) -> Iterator[SharePiece]:
        """Every query token of a call, in pieces of ``PIECE_CELLS`` cells at most, or of one chunk.

        Args:
            q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous.
            requests: the call's, with what this rank holds of each.
            options: its forced blocks.

        Raises:
            InvalidArgumentError: the backend needs more memory than there is.
        """
        run: list[_Chunk] = []
        tokens = columns = 0
        for chunk in _chunks(requests):
            tokens, columns = tokens + chunk.query_len, max(columns, chunk.columns)
            if run and q.shape[1] * tokens * columns > PIECE_CELLS:
                yield self._piece(q, run, options)
                run, tokens, columns = [], chunk.query_len, chunk.columns
            run.append(chunk)
        if run:
            yield self._piece(q, run, options)

    def _piece(self, q: torch.Tensor, chunks: list[_Chunk], options: ScoreOptions) -> SharePiece:
        start = chunks[0].query_start
        tokens = slice(start, chunks[-1].query_start + chunks[-1].query_len)
        columns = max(chunk.columns for chunk in chunks)
        device = self._pages.device
        seen = [chunk for chunk in chunks if chunk.num_held]
        try:
            scores = torch.empty(
                (q.shape[1], tokens.stop - start, columns), dtype=torch.float32, device=device
            )
            if seen:
                batch = ScoreBatch(
                    q=q[tokens],
                    pages=self._pages,
                    block_table=_block_table(seen, columns).to(device),
                    lut=self._lut,
                    requests=tuple(
                        chunk.virtual_request(row, chunk.query_start - start)
                        for row, chunk in enumerate(seen)
                    ),
                    init_blocks=0,
                    local_blocks=0,
                )
                self._backend.score(batch, scores)
            rows = self._finish(scores, chunks, options)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise InvalidArgumentError(
                "q.shape[0]",
                q.shape[0],
                f"backend {self._backend.name} needs more memory for them than there is",
                "score fewer queries at a time",
            ) from error
        return SharePiece(tokens, scores, rows.phases, rows.num_blocks)

    def _finish(self, scores: torch.Tensor, chunks: list[_Chunk], options: ScoreOptions) -> RowColumns:
        """Make virtual requests' scores those of the blocks held, and force blocks."""
        step = chunks[0].held.stripe.step
        # One copy to the device for all rows: a call of many short requests has a chunk for each.
        facts = _facts(chunks, options)
        rows = RowColumns.uploaded(facts, scores.device)
        unseen = np.flatnonzero(facts[_NUM_HELD] == 0)
        if unseen.size:
            scores.index_fill_(1, torch.from_numpy(unseen).to(scores.device), -torch.inf)
        if any(chunk.columns != chunk.num_held for chunk in chunks):
            keep_held(scores, rows, step, max(chunk.columns - chunk.whole for chunk in chunks))
        force(
            scores,
            rows,
            step,
            init_columns=int(facts[_INIT_END].max()),
            local_columns=int((facts[_NUM_HELD] - facts[_LOCAL_START]).max()) if options.local_blocks else 0,
            local_blocks=options.local_blocks,
        )
        return rows


@dataclass(frozen=True)
class _Chunk:
    held: HeldRequest
    query_start: int
    query_len: int
    first_position: int

    @property
    def first_block(self) -> int:
        return self.first_position // BLOCK_TOKENS

    @property
    def end_block(self) -> int:
        return (self.first_position + self.query_len - 1) // BLOCK_TOKENS + 1

    @property
    def whole(self) -> int:
        """Blocks held that every row sees whole."""
        return self.held.stripe.count(self.first_block)

    @property
    def num_held(self) -> int:
        """Blocks held that a row sees."""
        return self.held.stripe.count(self.end_block)

    @property
    def columns(self) -> int:
        """Blocks of the virtual request; without any block held there is none, but a column of -inf."""
        return self.whole + self.end_block - self.first_block if self.num_held else 1

    @property
    def first_held(self) -> int:
        """Column of the first block held from ``first_block`` on, if there is one; the next is a step on."""
        return self.whole + self.held.stripe.block(self.whole) - self.first_block

    def virtual_request(self, table_row: int, query_start: int) -> Request:
        """The request that a backend is given."""
        prefix = BLOCK_TOKENS * (self.whole - self.first_block) + self.first_position
        return Request(table_row, query_start, self.query_len, prefix + self.query_len)


def _chunks(requests: Sequence[HeldRequest]) -> Iterator[_Chunk]:
    for held in requests:
        request = held.request
        # A rank that holds every block has no column to spare.
        step = CHUNK_TOKENS if held.stripe.step > 1 else max(request.query_len, 1)
        for first in range(0, request.query_len, step):
            queries = min(step, request.query_len - first)
            yield _Chunk(held, request.query_start + first, queries, request.prefix_len + first)


def _block_table(chunks: list[_Chunk], columns: int) -> torch.Tensor:
    """``[chunks, columns]`` int32; page 0 stands for a block that is not held."""
    table = np.zeros((len(chunks), columns), dtype=np.int32)
    for row, chunk in zip(table, chunks):
        pages = np.frombuffer(chunk.held.pages, dtype=np.int32)
        whole, num_held = chunk.whole, chunk.num_held
        row[:whole] = pages[:whole]
        row[chunk.first_held : chunk.columns : chunk.held.stripe.step] = pages[whole:num_held]
    return torch.from_numpy(table)


def _facts(chunks: list[_Chunk], options: ScoreOptions) -> NDArray[np.int64]:
    """The fields of :class:`RowColumns` for every row of the chunks, ``[fields, tokens]``."""
    by_chunk = np.array(
        [
            (
                chunk.held.stripe.phase,
                chunk.first_position,
                chunk.whole,
                chunk.first_held,
                chunk.num_held,
                min(chunk.held.stripe.count(options.init_blocks), chunk.num_held),
                chunk.held.stripe.count(max(chunk.first_block + 1 - options.local_blocks, 0)),
            )
            for chunk in chunks
        ],
        dtype=np.int64,
    )
    query_lens = [chunk.query_len for chunk in chunks]
    facts = np.repeat(by_chunk.T, query_lens, axis=1)
    within = np.concatenate([np.arange(query_len) for query_len in query_lens])
    facts[_NUM_BLOCKS] = (facts[_NUM_BLOCKS] + within) // BLOCK_TOKENS + 1
    return facts


# ---- Columns of held blocks: move them together, force blocks; all rows of a piece at once ----
#
# A row's scores come as those of a virtual request: only its last columns, from ``whole`` on, stand for
# blocks that may not be held.


@dataclass(frozen=True, eq=False)
class RowColumns:
    """What the columns of each row are: ``[tokens]`` int64 on the device, unless said otherwise.

    Attributes:
        phases: the phase of the row's stripe.
        num_blocks: ``nb`` of the row.
        whole: blocks held that lie wholly before the row's chunk: their columns are in place.
        first_held: column of the first held block after those.
        num_held: blocks held that some row of the chunk sees.
        init_end: end of the columns of init blocks.
        local_start: first column that may be a local block's.
    """

    phases: torch.Tensor
    num_blocks: torch.Tensor
    whole: torch.Tensor
    first_held: torch.Tensor
    num_held: torch.Tensor
    init_end: torch.Tensor
    local_start: torch.Tensor

    @classmethod
    def uploaded(cls, facts: NDArray[np.int64], device: torch.device) -> RowColumns:
        """From ``[fields, tokens]`` on the host, in one copy."""
        if facts.shape[0] != len(fields(cls)):
            raise AssertionError("a row of facts for each field")
        return cls(*torch.from_numpy(facts).to(device).unbind())


_NUM_BLOCKS, _NUM_HELD, _INIT_END, _LOCAL_START = (
    [field.name for field in fields(RowColumns)].index(name)
    for name in ("num_blocks", "num_held", "init_end", "local_start")
)


def keep_held(scores: torch.Tensor, rows: RowColumns, step: int, most: int) -> None:
    """Move the columns of blocks that are held together; those past them become -inf.

    Args:
        scores: ``[H, tokens, columns]`` float32, written; -inf past each row's virtual request.
        rows: of the tokens.
        step: ranks that blocks go round.
        most: columns of a virtual request from ``whole`` on, at most.
    """
    columns = _window(rows.whole, most, scores.shape[2])
    whole = rows.whole[:, None]
    moved_from = columns.where(columns < whole, rows.first_held[:, None] + (columns - whole) * step)
    kept = _taken(scores, moved_from.clamp(max=scores.shape[2] - 1))
    kept.masked_fill_(columns >= rows.num_held[:, None], -torch.inf)
    _put(scores, columns, kept)


def force(
    scores: torch.Tensor,
    rows: RowColumns,
    step: int,
    *,
    init_columns: int,
    local_columns: int,
    local_blocks: int,
) -> None:
    """Write the sentinels of forced blocks, by their true ids; the local value wins over the init value.

    Args:
        scores: ``[H, tokens, columns]`` float32 of the blocks held, written.
        rows: of the tokens.
        step: ranks that blocks go round.
        init_columns: the largest ``init_end``.
        local_columns: columns from ``local_start`` to ``num_held``, at most.
        local_blocks: blocks forced at a row's end.
    """
    phases, num_blocks = rows.phases[:, None], rows.num_blocks[:, None]
    if init_columns > 0:
        columns = torch.arange(init_columns, dtype=torch.int64, device=scores.device)
        forced = (columns < rows.init_end[:, None]) & (columns * step + phases < num_blocks)
        scores[..., :init_columns].masked_fill_(forced, INIT_SCORE)
    if local_columns > 0:
        columns = _window(rows.local_start, local_columns, scores.shape[2])
        blocks = columns * step + phases
        forced = (
            (columns < rows.num_held[:, None]) & (blocks < num_blocks) & (blocks >= num_blocks - local_blocks)
        )
        _put(scores, columns, _taken(scores, columns).masked_fill_(forced, LOCAL_SCORE))


def _window(starts: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """``[tokens, width]``: so many columns of each row from its start on, or the last ones that there are."""
    return starts.clamp(max=columns - width)[:, None] + torch.arange(
        width, dtype=torch.int64, device=starts.device
    )


def _taken(scores: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return scores.gather(2, columns.expand(scores.shape[0], -1, -1))


def _put(scores: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    scores.scatter_(2, columns.expand(scores.shape[0], -1, -1), values)


# ---- Merge: the best blocks of all ranks, or all their scores ----
#
# A candidate is a score and its block id packed into an int64 whose order is that of a selection, see
# :mod:`kernel.backends.cpu.topk`. It is a total order, so the k greatest of all ranks' k greatest candidates
# are the k greatest of all blocks, whatever rank a block lies on.


def best_candidates(
    backend: Backend, pieces: Iterable[SharePiece], shape: tuple[int, int, int], context_ranks: int
) -> torch.Tensor:
    """Each row's best blocks of those that this rank holds.

    Args:
        backend: selects.
        pieces: the scores.
        shape: ``H``, ``total_q`` and k.
        context_ranks: ranks that blocks go round.

    Returns:
        ``[H, total_q, k]`` int64, ``ABSENT`` where the rank has fewer than k blocks for a row.
    """
    candidates = torch.full(shape, ABSENT, dtype=torch.int64, device=backend.device)
    for piece in pieces:
        heads, tokens, columns = piece.scores.shape
        # Of a row that sees no block held one column is read all the same: its block lies past the row's nb.
        num_held = (piece.num_blocks - piece.phases + context_ranks - 1) // context_ranks
        found = torch.empty((heads, tokens, shape[2]), dtype=torch.int32, device=backend.device)
        backend.topk(piece.scores, num_held.clamp(1, columns).to(torch.int32), found, "score")
        cells = piece.scores.gather(2, found.clamp(min=0).long())
        blocks = piece.phases[:, None] + context_ranks * found
        blocks = torch.where(found < 0, piece.num_blocks.unsqueeze(1), blocks)
        limits = piece.num_blocks.expand(heads, -1).flatten()
        packed = pack_blocks(cells.flatten(0, 1), blocks.flatten(0, 1), limits)
        candidates[:, piece.tokens] = packed.view(heads, tokens, -1)
    return candidates


def merge_candidates(candidates: torch.Tensor, head_groups: int, order: Order) -> torch.Tensor:
    """The selection from every rank's candidates.

    Args:
        candidates: ``[ranks, H / head_groups, total_q, k]`` int64, a head group's ranks together.
        head_groups: groups of ranks with the same heads.
        order: of the block ids.

    Returns:
        ``[H, total_q, k]`` int32.
    """
    ranks, heads, tokens, k = candidates.shape
    by_row = candidates.view(head_groups, ranks // head_groups, heads * tokens, k).transpose(1, 2)
    selected = unpack(best(by_row.flatten(2).flatten(0, 1), k), order)
    return selected.view(head_groups * heads, tokens, k)


def write_share(pieces: Iterable[SharePiece], share: torch.Tensor) -> None:
    """Write the scores of all pieces.

    Args:
        pieces: the scores.
        share: ``[H, total_q, columns]`` float32; -inf past a piece's columns.
    """
    for piece in pieces:
        columns = min(piece.scores.shape[2], share.shape[2])
        share[:, piece.tokens, :columns] = piece.scores[..., :columns]
        share[:, piece.tokens, columns:] = -torch.inf


def merge_scores(shares: torch.Tensor, requests: Iterable[HeldRequest], scores: torch.Tensor) -> None:
    """Put every rank's columns in their places.

    Args:
        shares: ``[head groups, context ranks, H / head groups, total_q, columns]`` float32.
        requests: of the call.
        scores: ``[H, total_q, S]`` float32, written.
    """
    groups, ranks = shares.shape[:2]
    by_group = scores.view(groups, shares.shape[2], *scores.shape[1:])
    first_ranks = torch.zeros(scores.shape[1], dtype=torch.int64, device="cpu")
    for held in requests:
        request = held.request
        first_ranks[request.query_start : request.query_start + request.query_len] = held.first_rank
    for first_rank in set(first_ranks.tolist()):
        rows = (first_ranks == first_rank).nonzero().flatten().to(scores.device)
        for rank in range(ranks):
            columns = by_group[..., (rank - first_rank) % ranks :: ranks]
            columns[:, :, rows] = shares[:, rank][:, :, rows, : columns.shape[3]]
