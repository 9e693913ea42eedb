"""Judges an engine's recorded result: whether it is right, where it is not, and which fault explains it."""

from __future__ import annotations

from indexer.explain.engine import MAX_FINDINGS, EngineJudge
from indexer.explain.verdict import Cause, EngineVerdict, Finding, WrittenKeys

__all__ = ["MAX_FINDINGS", "Cause", "EngineJudge", "EngineVerdict", "Finding", "WrittenKeys"]
