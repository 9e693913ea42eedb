"""Case files: one scoring call in a safetensors file, to exchange between engines, tools and the service.

Imports no torch: a remote client uses it too. :mod:`indexer.replay` runs a case.
"""

from __future__ import annotations

from indexer.case.case import Case, EngineOrder, EngineRecord
from indexer.case.codec import case_buffers, decode_case, encode_case, read_case, write_case

__all__ = [
    "Case",
    "EngineOrder",
    "EngineRecord",
    "case_buffers",
    "decode_case",
    "encode_case",
    "read_case",
    "write_case",
]
