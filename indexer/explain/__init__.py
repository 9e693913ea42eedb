"""Whether an engine's recorded result is right, where it is not, and which fault explains that."""

from __future__ import annotations

from indexer.explain.engine_verdict import Cause, EngineVerdict, Finding, WrittenKeys
from indexer.explain.explain import MAX_FINDINGS, EngineJudge

__all__ = ["MAX_FINDINGS", "Cause", "EngineJudge", "EngineVerdict", "Finding", "WrittenKeys"]
