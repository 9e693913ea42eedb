"""Reads the safetensors container strictly, and writes it; no tensor is copied.

    bytes 0..7        N, the header's length, little-endian unsigned
    bytes 8..8+N-1    JSON: tensor name -> dtype, shape, data_offsets; ``__metadata__`` -> strings
    the rest          the tensors' bytes, one after another, no gap and no overlap

Files come from engines and from the network. So nothing is allocated from a number that the header states:
each tensor is a view of bytes that are there, and the header itself is bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernel.errors import CaseFileError

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

LENGTH_BYTES = 8
"""Bytes of the header's length."""
MAX_HEADER_BYTES = 1 << 16
"""Longest header, bytes: a case's takes about 1 KB, the text of ``source`` most of it."""
MAX_DIMS = 4
"""Most dimensions of a tensor."""
MAX_INT_DIGITS = 18
"""Most digits of a number in the header: any size in bytes that a file can have fits."""
SHOWN_CHARS = 60
"""Characters of a hostile value that a message repeats."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
"""Container dtypes that are read, as numpy's."""


@dataclass(frozen=True)
class Container:
    """What a container holds."""

    tensors: dict[str, Array]
    """By name; views of the buffer, read-only where the buffer is."""
    metadata: dict[str, str]


def refuse(argument: str, value: object, limit: str, remedy: str) -> NoReturn:
    """Raise :class:`CaseFileError`. A function, so that a check is one line."""
    raise CaseFileError(argument, value, limit, remedy)


def shown(value: object) -> str:
    """A value from a file, short and printable whatever it holds."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def decode_container(body: Buffer) -> Container:
    """Check a whole container and view its tensors.

    Args:
        body: the container from its first byte to its last.

    Raises:
        CaseFileError: the container breaks a rule of the format or of this reader; names the tensor or field.
    """
    view = memoryview(body).cast("B")
    header, start = _header(view)
    metadata = _metadata(header.pop("__metadata__", {}))
    data = view[start:]
    placed = [_placed(name, entry, data.nbytes) for name, entry in header.items()]
    end = 0
    for tensor in sorted(placed, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end:
            limit = f"must begin at byte {end}, where the tensor before it ends"
            remedy = "leave no gap and no overlap between tensors"
            refuse(f"{shown(tensor.name)}.data_offsets", [tensor.begin, tensor.end], limit, remedy)
        end = tensor.end
    if end != data.nbytes:
        refuse("file size", view.nbytes, f"must be {start + end} bytes", "write no byte after the tensors")
    return Container({tensor.name: tensor.view(data) for tensor in placed}, metadata)


@dataclass(frozen=True)
class _PlacedTensor:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int

    def view(self, data: memoryview) -> Array:
        return np.frombuffer(data[self.begin : self.end], dtype=self.dtype).reshape(self.shape)


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    if view.nbytes < LENGTH_BYTES:
        limit = f"must be at least {LENGTH_BYTES} bytes"
        refuse("file size", view.nbytes, limit, "pass a whole safetensors file")
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        refuse("header length", length, f"must be at most {MAX_HEADER_BYTES} bytes", "pass a case file")
    start = LENGTH_BYTES + length
    if start > view.nbytes:
        refuse("header length", length, f"must fit the file's {view.nbytes} bytes", "pass the whole file")
    text = bytes(view[LENGTH_BYTES:start])
    if not text.startswith(b"{"):
        refuse("header", shown(text[:8]), "must start with '{'", "pass a safetensors file")
    try:
        header = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_distinct,
            parse_int=_whole,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
        )
    except RecursionError:
        refuse("header", shown(text[:8]), "must not nest deeper than tensors need", "pass a safetensors file")
    except UnicodeDecodeError as error:
        refuse(
            "header", shown(error.object[error.start]), f"must be UTF-8 at byte {error.start}", "encode it so"
        )
    except json.JSONDecodeError as error:
        refuse(
            "header", shown(error.msg), f"must be JSON at character {error.pos}", "pass a safetensors file"
        )
    return header, start


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            refuse("header", shown(name), "must name each tensor and field once", "keep one of them")
        found[name] = value
    return found


def _whole(digits: str) -> int:
    # Python 3.10 converts any number of digits, in quadratic time.
    if len(digits) > MAX_INT_DIGITS:
        limit = f"must hold numbers of at most {MAX_INT_DIGITS} digits"
        refuse("header", shown(digits), limit, "check the sizes")
    return int(digits)


def _no_fraction(number: str) -> NoReturn:
    refuse("header", shown(number), "must hold whole numbers only", "check the sizes")


def _metadata(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict):
        refuse("__metadata__", shown(metadata), "must be an object of strings", "write strings")
    for name, value in metadata.items():
        if not isinstance(value, str):
            refuse(f"metadata {shown(name)}", shown(value), "must be a string", "write it as a string")
    return metadata


def _placed(name: str, entry: object, data_bytes: int) -> _PlacedTensor:
    label = shown(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        limit = "must have dtype, shape and data_offsets and nothing else"
        refuse(label, shown(entry), limit, "rewrite the file")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        limit = f"must be one of {', '.join(DTYPES)}"
        refuse(f"{label}.dtype", shown(entry["dtype"]), limit, "write the tensor as one of them")
    shape = entry["shape"]
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        limit = f"must be at most {MAX_DIMS} sizes of 0 or more"
        refuse(f"{label}.shape", shown(shape), limit, "write the contract's shape")
    # numpy refuses an empty array whose other sizes overflow its own index type.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 59:
        limit = "must describe fewer than 2^59 bytes"
        refuse(f"{label}.shape", shown(shape), limit, "write the contract's shape")
    offsets = entry["data_offsets"]
    if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        limit = f"must be a begin and an end within the {data_bytes} bytes after the header"
        refuse(f"{label}.data_offsets", shown(offsets), limit, "pass the whole file")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        limit = f"must span {shown(nbytes)} bytes, the size of {entry['dtype']} {shown(shape)}"
        refuse(f"{label}.data_offsets", shown(offsets), limit, "rewrite the file")
    return _PlacedTensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(sizes: object) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


# ---- Writing ----

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
            limit = f"must be one of {', '.join(DTYPES)}"
            refuse(f"{name}.dtype", array.dtype, limit, "call .astype() with one of them")
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        end += array.nbytes
        # Python's buffers know nothing of bfloat16 and float8.
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        refuse(
            "header length", len(text), f"must be at most {MAX_HEADER_BYTES} bytes", "shorten the metadata"
        )
    return [len(text).to_bytes(LENGTH_BYTES, "little") + text, *buffers]
