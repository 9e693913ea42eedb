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
from dataclasses import dataclass

import torch

from indexer.distributed.stripe import Stripe
from indexer.pipeline import score_requests
from indexer.score_call import ScoreCall
from kernel.backends.base import Backend
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS
from kernel.errors import InvalidArgumentError

CHUNK_TOKENS = 1024
"""Query tokens of a chunk. The at most nine blocks it lies in are scored by every rank."""
PIECE_CELLS = 1 << 26
"""Score cells of a piece: 256 MiB."""


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

    def held_columns(self) -> torch.Tensor:
        """Columns of the blocks held from ``first_block`` on."""
        stripe = self.held.stripe
        first = self.whole + stripe.block(self.whole) - self.first_block
        columns = torch.arange(self.num_held - self.whole, dtype=torch.int64, device="cpu")
        return columns * stripe.step + first

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
        for chunk in _chunks(requests):
            together = [*run, chunk]
            tokens = sum(other.query_len for other in together)
            if run and q.shape[1] * tokens * max(other.columns for other in together) > PIECE_CELLS:
                yield self._piece(q, run, call)
                together = [chunk]
            run = together
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
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise InvalidArgumentError(
                "q.shape[0]",
                q.shape[0],
                f"backend {self._backend.name} needs more memory for them than there is",
                "score fewer queries at a time",
            ) from error
        phases = torch.empty(tokens.stop - start, dtype=torch.int64, device="cpu")
        num_blocks = torch.empty_like(phases)
        for chunk in chunks:
            first = chunk.query_start - start
            rows = slice(first, first + chunk.query_len)
            positions = torch.arange(chunk.query_len, dtype=torch.int64, device="cpu") + chunk.first_position
            phases[rows] = chunk.held.stripe.phase
            num_blocks[rows] = positions // BLOCK_TOKENS + 1
            cells = scores[:, rows]
            if not chunk.num_held:
                cells.fill_(-torch.inf)
                continue
            _keep_held(cells, chunk)
            _force(cells, chunk, num_blocks[rows].to(device), call.init_blocks, call.local_blocks)
        return SharePiece(tokens, scores, phases.to(device), num_blocks.to(device))


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
    table = torch.zeros((len(chunks), columns), dtype=torch.int32, device="cpu")
    for row, chunk in zip(table, chunks):
        pages = torch.frombuffer(chunk.held.pages, dtype=torch.int32)
        row[: chunk.whole] = pages[: chunk.whole]
        row[chunk.held_columns()] = pages[chunk.whole : chunk.num_held]
    return table


def _keep_held(cells: torch.Tensor, chunk: _Chunk) -> None:
    """Move the columns ``[H, tokens, columns]`` of blocks held together; those past them become -inf."""
    if chunk.columns == chunk.num_held:
        return
    columns = chunk.held_columns().to(cells.device)
    cells[..., chunk.whole : chunk.num_held] = cells.index_select(2, columns)
    cells[..., chunk.num_held : chunk.columns] = -torch.inf


def _force(
    cells: torch.Tensor, chunk: _Chunk, num_blocks: torch.Tensor, init_blocks: int, local_blocks: int
) -> None:
    """Write the sentinels into ``[H, tokens, columns]``; the local value wins over the init value."""
    stripe, nb = chunk.held.stripe, num_blocks[:, None]
    end = min(stripe.count(init_blocks), chunk.num_held)
    if end:
        blocks = _blocks(stripe, 0, end, cells.device)
        cells[..., :end].masked_fill_(blocks < nb, INIT_SCORE)
    first = stripe.count(max(chunk.first_block + 1 - local_blocks, 0))
    if first < chunk.num_held:
        blocks = _blocks(stripe, first, chunk.num_held, cells.device)
        forced = (blocks < nb) & (blocks >= nb - local_blocks)
        cells[..., first : chunk.num_held].masked_fill_(forced, LOCAL_SCORE)


def _blocks(stripe: Stripe, first: int, end: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.int64, device=device) * stripe.step + stripe.phase
