"""What travels over HTTP beside case files: safetensors bodies, read by the same strict decoder.

Imports no torch: the server and a remote client share it.
"""

from __future__ import annotations

from indexer.case.encoder import encode_container
from indexer.wire.calls import (
    KeysBody,
    SequencesCall,
    decode_keys,
    decode_sequences_call,
    encode_keys,
    encode_sequences_call,
)
from indexer.wire.profile import Floor, Profile, StageMs
from indexer.wire.reply import ScoreReply, decode_reply, encode_reply

__all__ = [
    "Floor",
    "KeysBody",
    "Profile",
    "ScoreReply",
    "SequencesCall",
    "StageMs",
    "decode_keys",
    "decode_reply",
    "decode_sequences_call",
    "encode_container",
    "encode_keys",
    "encode_reply",
    "encode_sequences_call",
]
