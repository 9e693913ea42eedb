"""How much of the selection survives quantisation: top-k recall against unquantised bf16 scoring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from indexer.case import Case
from indexer.replay import as_tensor
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request
from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.page import blocks_of

_CHUNK_ROWS = 1024
_CHUNK_BLOCKS = 64  # with the rows, 32 MiB of fp32 products at a time


@dataclass(frozen=True, eq=False)
class Recall:
    """Top-k recall of a selection, over the rows where there is something to choose.

    Attributes:
        per_row: ``[counted rows]`` float64, share of the exact selection that was selected, head by head.
        rows: rows of the case.
    """

    per_row: torch.Tensor
    rows: int

    @property
    def counted_rows(self) -> int:
        """Rows with more free blocks than free slots."""
        return self.per_row.numel()

    @property
    def mean(self) -> float:
        """Mean over the counted rows; 1 if there is none, since nothing could be chosen wrongly."""
        return float(self.per_row.mean()) if self.counted_rows else 1.0

    @property
    def worst(self) -> float:
        """Least over the counted rows."""
        return float(self.per_row.min()) if self.counted_rows else 1.0


Reduce = Callable[[torch.Tensor], torch.Tensor]


def _largest(products: torch.Tensor) -> torch.Tensor:
    return products.amax(dim=3)


def unquantised_scores(case: Case) -> torch.Tensor:
    """Scores from the case's own q and k, products summed in fp32, no sentinel: ``[H, total_q, S]`` float32.

    ``max over the causal tokens of the block of q . k``, ``-inf`` where no token of the block is causal.

    Raises:
        InvalidArgumentError: the case holds NVFP4 pages, so what they were quantised from is not known.
    """
    if case.index_k is None:
        raise InvalidArgumentError(
            "index_k", "missing", "fidelity needs the keys before quantisation", "record a case with index_k"
        )
    return block_scores(case, as_tensor(case.index_q).float(), as_tensor(case.index_k))


def block_scores(
    case: Case, queries: torch.Tensor, keys: torch.Tensor, reduce: Reduce = _largest
) -> torch.Tensor:
    """Scores of any queries and keys in a case's place: ``[H, total_q, S]`` float32, no sentinel.

    Args:
        case: for its lengths.
        queries: ``[total_q, H, 128]`` float32.
        keys: ``[total_k, 128]``, of any float type.
        reduce: products ``[H, n, blocks, 128]`` to a value for each block, of which the score is the largest.
    """
    shape = (case.num_heads, case.total_q, case.num_score_blocks)
    scores = torch.full(shape, -torch.inf, dtype=torch.float32, device="cpu")
    starts = case.cu_seqlens_q.tolist()
    for row, request_keys in enumerate(torch.split(keys, case.seq_lens.tolist())):
        request = Request(row, starts[row], starts[row + 1] - starts[row], request_keys.shape[0])
        _score_request(queries.transpose(0, 1), request_keys, request, scores, reduce)
    return scores


def with_sentinels(case: Case, scores: torch.Tensor) -> torch.Tensor:
    """Scores ``[H, total_q, S]`` with a case's init and local blocks forced."""
    num_blocks = torch.from_numpy(case.num_blocks_per_query()).long()[:, None]
    blocks = torch.arange(scores.shape[2], dtype=torch.int64, device="cpu")
    forced = scores.masked_fill((blocks < case.init_blocks) & (blocks < num_blocks), INIT_SCORE)
    local = (blocks >= num_blocks - case.local_blocks) & (blocks < num_blocks)
    return forced.masked_fill(local, LOCAL_SCORE)


def selection_recall(case: Case, scores: torch.Tensor, block_ids: torch.Tensor) -> Recall:
    """Recall of a selection against the top-k of other scores, forced blocks left out of both.

    ``|selected & best| / slots``: a row's slots are ``topk`` less its forced blocks, and ``best`` are that
    many free blocks of highest score, ties to the lower id. Rows whose free blocks all fit are not counted.

    Args:
        case: for its ``topk``, ``init_blocks``, ``local_blocks`` and lengths.
        scores: ``[H, total_q, S]`` float32 to select the best by.
        block_ids: ``[H, total_q, topk]`` int32, the selection to judge; -1 is no block.
    """
    num_blocks = torch.from_numpy(case.num_blocks_per_query()).long()[:, None]
    blocks = torch.arange(scores.shape[2], dtype=torch.int64, device="cpu")
    first_free = min(case.init_blocks, blocks.numel())
    free = (blocks >= first_free) & (blocks < num_blocks - case.local_blocks)
    free_blocks = free.sum(dim=1)
    slots = case.topk - (num_blocks[:, 0] - free_blocks)
    counted = (slots > 0) & (free_blocks > slots)
    order = scores.masked_fill(~free, -torch.inf).argsort(dim=2, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(2, order, blocks.expand_as(order))
    best = (rank < slots[:, None]) & free
    shape = (*scores.shape[:2], blocks.numel() + 1)
    selected = torch.zeros(shape, dtype=torch.bool, device="cpu")
    selected.scatter_(2, block_ids.masked_fill(block_ids < 0, blocks.numel()).long(), True)
    common = (selected[:, :, :-1] & best).sum(dim=2)
    recall = common.double() / slots.clamp(min=1)
    return Recall(recall[:, counted].flatten(), scores.shape[0] * scores.shape[1])


def _score_request(
    query: torch.Tensor, keys: torch.Tensor, request: Request, scores: torch.Tensor, reduce: Reduce
) -> None:
    heads = query.shape[0]
    chunk_queries = max(1, _CHUNK_ROWS // heads)
    for first in range(0, request.query_len, chunk_queries):
        count = min(chunk_queries, request.query_len - first)
        rows = slice(request.query_start + first, request.query_start + first + count)
        positions = request.prefix_len + torch.arange(first, first + count, dtype=torch.int64, device="cpu")
        for first_block in range(0, blocks_of(int(positions[-1]) + 1), _CHUNK_BLOCKS):
            first_token = first_block * BLOCK_TOKENS
            chunk = keys[first_token : first_token + _CHUNK_BLOCKS * BLOCK_TOKENS].float()
            # Into a given tensor: autocast would round the product to its own dtype.
            product = torch.empty((heads * count, chunk.shape[0]), dtype=torch.float32, device="cpu")
            torch.mm(query[:, rows].reshape(-1, HEAD_DIM), chunk.T, out=product)
            products = product.view(heads, count, -1)
            tokens = torch.arange(chunk.shape[0], dtype=torch.int64, device="cpu")
            later = first_token + tokens > positions[:, None]
            products.masked_fill_(later, -torch.inf)
            missing = -chunk.shape[0] % BLOCK_TOKENS
            padded = torch.nn.functional.pad(products, (0, missing), value=-torch.inf)
            best = reduce(padded.view(heads, count, -1, BLOCK_TOKENS))
            scores[:, rows, first_block : first_block + best.shape[2]] = best
