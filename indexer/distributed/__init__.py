"""One scorer over several ranks of a torch.distributed process group: each of them holds some blocks."""

from __future__ import annotations

from indexer.distributed.scorer import DistributedIndexScorer

__all__ = ["DistributedIndexScorer"]
