"""The HTTP sidecar: one `IndexScorer` for people who test and profile it apart from an engine."""

from __future__ import annotations
