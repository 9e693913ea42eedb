"""The best blocks of a rank, and of all ranks.

A candidate is a score and its block id packed into an int64 whose order is that of a selection, see
:mod:`kernel.backends.cpu.topk`. It is a total order, so the k greatest of all ranks' k greatest candidates
are the k greatest of all blocks, whatever rank a block lies on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from indexer.distributed.share import HeldRequest, SharePiece
from kernel.backends.base import Backend, Order
from kernel.backends.cpu.topk import ABSENT, best, pack_blocks, unpack


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
