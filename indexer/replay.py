"""Run a case: its arrays as tensors, its keys in a scorer, its rows scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from indexer.case import Case
from indexer.case.container import Array
from indexer.config import IndexerConfig
from indexer.result import ScoreResult
from indexer.scorer import IndexScorer
from indexer.stages import StageTimes
from kernel.backends.base import Order, Precision
from kernel.checks import check_finite
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES
from kernel.page import PAGE_STRIDE_ALIGNMENT, blocks_of

# numpy knows these types only through ml_dtypes, torch knows nothing of that: they cross as integers.
_CROSSING: dict[np.dtype[Any], tuple[str, torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): ("i2", torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): ("u1", torch.float8_e4m3fn),
}


def as_tensor(array: Array, alignment: int = 1) -> torch.Tensor:
    """An array of a case as a host tensor that shares its memory and must not be written to.

    It is copied only where it starts at an address that its dtype or ``alignment`` (bytes) does not allow.
    """
    crossing = _CROSSING.get(array.dtype)
    if crossing is not None:
        array = array.view(crossing[0])
    if not array.flags.aligned or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    if tensor.data_ptr() % alignment:
        tensor = tensor.clone()
    return tensor if crossing is None else tensor.view(crossing[1])


@dataclass(frozen=True, eq=False)
class LoadedCase:
    """A case whose keys are where a scorer reads them.

    Attributes:
        case: the case.
        scorer: holds the keys of a case with ``index_k``, and no page for one with ``pages``.
        append_seconds: time to quantise and insert the keys; 0 for a case with ``pages``.
    """

    case: Case
    scorer: IndexScorer
    append_seconds: float
    _sequences: tuple[int, ...]
    _paged: tuple[torch.Tensor, ...]
    _query: torch.Tensor

    def score(self, *, return_scores: bool = True, order: Order = "score") -> ScoreResult:
        """Score the call; may be repeated.

        Raises:
            InvalidArgumentError: scores that do not fit in memory.
        """
        if self._paged:
            return self.scorer.score_paged(
                self._query, *self._paged, return_scores=return_scores, order=order
            )
        query_lens = self.case.query_lens.tolist()
        return self.scorer.score(
            self._query, self._sequences, query_lens, return_scores=return_scores, order=order
        )


def load_case(
    case: Case, backend: str = "auto", *, device: str | None = None, precision: Precision = "exact"
) -> LoadedCase:
    """Build a scorer for a case and give it the keys.

    Args:
        case: the case.
        backend: a backend's name, or ``auto``.
        device: torch device; the backend's default when None.
        precision: ``exact`` or ``fast``.

    Raises:
        InvalidArgumentError: no such backend or device, or a key or query that is not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    own_pages = case.index_k is not None
    config = IndexerConfig(
        num_index_heads=case.num_heads,
        num_pages=sum(map(blocks_of, case.seq_lens.tolist())) if own_pages else 0,
        topk_blocks=case.topk,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
        backend=backend,
        device=device,
        precision=precision,
    )
    scorer = IndexScorer(config)
    query = as_tensor(case.index_q).to(scorer.device)
    check_finite("index_q", query)  # the scorer checks too, but would not name a place in the file
    if case.index_k is None:
        return LoadedCase(case, scorer, 0.0, (), _paged(case, scorer.device), query)
    keys = as_tensor(case.index_k).to(scorer.device)
    check_finite("index_k", keys)
    sequences = []
    times = StageTimes(scorer.device)
    with times.stage("append"):
        for request_keys in torch.split(keys, case.seq_lens.tolist()):
            sequences.append(scorer.add_sequence())
            scorer.append_keys(sequences[-1], request_keys)
    return LoadedCase(case, scorer, times["append"], tuple(sequences), (), query)


def flop(case: Case) -> int:
    """Work of scoring a case: ``2 * 128 * (visible blocks * 128)``, summed over its rows."""
    visible_blocks = int(case.num_blocks_per_query().sum(dtype=np.int64)) * case.num_heads
    return 2 * 128 * visible_blocks * BLOCK_TOKENS


def _paged(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    if case.pages is None or case.block_table is None:
        raise AssertionError("a case has one of the two forms")
    pages = as_tensor(case.pages.reshape(-1, PAGE_BYTES), alignment=PAGE_STRIDE_ALIGNMENT)
    rest = (case.block_table, case.cu_seqlens_q, case.seq_lens)
    return (pages.to(device), *(as_tensor(array).to(device) for array in rest))


class _Writable:
    """Shows a read-only array to torch, which has no read-only tensors, as a writable one."""

    def __init__(self, array: Array) -> None:
        self._owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
