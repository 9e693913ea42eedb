"""A rank's part of a call: the scores of the blocks it holds, by any backend.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.distributed.held_columns import RowColumns, force, keep_held
from indexer.distributed.stripe import Stripe
from indexer.pipeline import score_requests
from indexer.score_call import ScoreCall
from kernel.backends.base import Backend
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS
from kernel.errors import InvalidArgumentError

CHUNK_TOKENS = 1024
"""Query tokens of a chunk. The at most nine blocks it lies in are scored by every rank."""
PIECE_CELLS = 1 << 26
"""Score cells of a piece: 256 MiB."""
_NUM_BLOCKS, _NUM_HELD, _INIT_END, _LOCAL_START = (
    [field.name for field in fields(RowColumns)].index(name)
    for name in ("num_blocks", "num_held", "init_end", "local_start")
)


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
        self, q: torch.Tensor, requests: Sequence[HeldRequest], call: ScoreCall
    ) -> Iterator[SharePiece]:
        """Every query token of a call, in pieces of ``PIECE_CELLS`` cells at most, or of one chunk.

        Args:
            q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous.
            requests: the call's, with what this rank holds of each.
            call: its forced blocks.

        Raises:
            InvalidArgumentError: the backend needs more memory than there is.
        """
        run: list[_Chunk] = []
        tokens = columns = 0
        for chunk in _chunks(requests):
            tokens, columns = tokens + chunk.query_len, max(columns, chunk.columns)
            if run and q.shape[1] * tokens * columns > PIECE_CELLS:
                yield self._piece(q, run, call)
                run, tokens, columns = [], chunk.query_len, chunk.columns
            run.append(chunk)
        if run:
            yield self._piece(q, run, call)

    def _piece(self, q: torch.Tensor, chunks: list[_Chunk], call: ScoreCall) -> SharePiece:
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
                score_requests(self._backend, batch, scores)
            rows = self._finish(scores, chunks, call)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise InvalidArgumentError(
                "q.shape[0]",
                q.shape[0],
                f"backend {self._backend.name} needs more memory for them than there is",
                "score fewer queries at a time",
            ) from error
        return SharePiece(tokens, scores, rows.phases, rows.num_blocks)

    def _finish(self, scores: torch.Tensor, chunks: list[_Chunk], call: ScoreCall) -> RowColumns:
        """Make virtual requests' scores those of the blocks held, and force blocks."""
        step = chunks[0].held.stripe.step
        # One copy to the device for all rows: a call of many short requests has a chunk for each.
        facts = _facts(chunks, call)
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
            local_columns=int((facts[_NUM_HELD] - facts[_LOCAL_START]).max()) if call.local_blocks else 0,
            local_blocks=call.local_blocks,
        )
        return rows


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


def _facts(chunks: list[_Chunk], call: ScoreCall) -> NDArray[np.int64]:
    """The fields of :class:`RowColumns` for every row of the chunks, ``[fields, tokens]``."""
    by_chunk = np.array(
        [
            (
                chunk.held.stripe.phase,
                chunk.first_position,
                chunk.whole,
                chunk.first_held,
                chunk.num_held,
                min(chunk.held.stripe.count(call.init_blocks), chunk.num_held),
                chunk.held.stripe.count(max(chunk.first_block + 1 - call.local_blocks, 0)),
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
