"""Records an engine's calls as case files while it serves."""

from __future__ import annotations

from indexer.recording.recorder import Recorder, capture

__all__ = ["Recorder", "capture"]
