"""State around the kernels: the scorer, its paged cache and block tables, case files, captures.

The public names are imported on first use, so that reading a case file needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from indexer.case import Case
    from indexer.config import IndexerConfig
    from indexer.distributed import DistributedIndexScorer
    from indexer.pipeline import ScoreResult
    from indexer.recording import Recorder, capture
    from indexer.scorer import IndexScorer
    from kernel.errors import (
        BackendUnavailableError,
        CaseFileError,
        IndexerError,
        InvalidArgumentError,
        OutOfPagesError,
        RankDisagreementError,
        RankError,
        RankLostError,
        ReentrantCallError,
        UnknownSequenceError,
    )

__all__ = [
    "BackendUnavailableError",
    "Case",
    "CaseFileError",
    "DistributedIndexScorer",
    "IndexScorer",
    "IndexerConfig",
    "IndexerError",
    "InvalidArgumentError",
    "OutOfPagesError",
    "RankDisagreementError",
    "RankError",
    "RankLostError",
    "Recorder",
    "ReentrantCallError",
    "ScoreResult",
    "UnknownSequenceError",
    "capture",
]

_MODULES = {
    "BackendUnavailableError": "kernel.errors",
    "Case": "indexer.case",
    "CaseFileError": "kernel.errors",
    "DistributedIndexScorer": "indexer.distributed",
    "IndexScorer": "indexer.scorer",
    "IndexerConfig": "indexer.config",
    "IndexerError": "kernel.errors",
    "InvalidArgumentError": "kernel.errors",
    "OutOfPagesError": "kernel.errors",
    "RankDisagreementError": "kernel.errors",
    "RankError": "kernel.errors",
    "RankLostError": "kernel.errors",
    "Recorder": "indexer.recording",
    "ReentrantCallError": "kernel.errors",
    "ScoreResult": "indexer.pipeline",
    "UnknownSequenceError": "kernel.errors",
    "capture": "indexer.recording",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
