"""Writes a safetensors container as buffers: the same tensors give the same bytes, and none is copied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from indexer.case.container import DTYPES, LENGTH_BYTES, MAX_HEADER_BYTES, Array, Buffer
from kernel.errors import CaseFileError

HEADER_ALIGNMENT = 16
"""Bytes the first tensor's place in the container is a multiple of: what pages need."""
_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


def encode_container(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> list[Buffer]:
    """A container as buffers to be sent one after another: the header, then the memory of each tensor.

    Args:
        tensors: arrays of a dtype that :data:`indexer.case.container.DTYPES` has. Those that are contiguous
            are not copied, so they must not change before the buffers are sent.
        metadata: strings.

    Raises:
        CaseFileError: a dtype that the container has no name for, or a header too long to be read again.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    buffers: list[Buffer] = []
    end = 0
    for name, array in tensors.items():
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise CaseFileError(
                f"{name}.dtype",
                array.dtype,
                f"must be one of {', '.join(DTYPES)}",
                "call .astype() with one of them",
            )
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
        # Python's buffers know nothing of bfloat16 and float8.
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CaseFileError(
            "header length", len(text), f"must be at most {MAX_HEADER_BYTES} bytes", "shorten the metadata"
        )
    return [len(text).to_bytes(LENGTH_BYTES, "little") + text, *buffers]
