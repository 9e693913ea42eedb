"""What travels over HTTP beside case files: safetensors bodies, read by the same strict decoder.

Imports no torch: the server and a remote client share it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from indexer.case.container import Array, Buffer, Container, decode_container, encode_container, refuse, shown
from kernel.contract import HEAD_DIM
from kernel.errors import CaseFileError

# Bodies of the calls that work on a server's sequences: keys to append, and queries to score.
#
# A keys body holds one tensor ``index_k``. A sequences body holds ``index_q``, optionally ``query_lens``, and
# the metadata field ``sequences``: the ids, separated by commas.


@dataclass(frozen=True, eq=False)
class KeysBody:
    """Keys to append.

    Attributes:
        index_k: ``[n, 128]`` bfloat16, float16 or float32.
    """

    index_k: Array


@dataclass(frozen=True, eq=False)
class SequencesCall:
    """Queries for the last positions of some sequences.

    Attributes:
        index_q: ``[total_q, H, 128]`` bfloat16, float16, float32 or float8_e4m3fn.
        sequences: ids of the sequences, in the order of their rows in ``index_q``.
        query_lens: queries of each sequence. None: all rows belong to the only sequence, or each of several
            sequences has one.
    """

    index_q: Array
    sequences: tuple[str, ...]
    query_lens: tuple[int, ...] | None = None


def encode_keys(index_k: Array) -> list[Buffer]:
    """A keys body as buffers to be sent one after another."""
    return encode_container({"index_k": index_k}, {})


def decode_keys(body: Buffer) -> KeysBody:
    """Read a keys body. Its array is a view of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    _check_names(container, {"index_k"}, (), set())
    index_k = container.tensors["index_k"]
    if index_k.ndim != 2 or index_k.shape[1] != HEAD_DIM:
        refuse("index_k.shape", list(index_k.shape), f"must be [any, {HEAD_DIM}]", "write one key a row")
    return KeysBody(index_k)


def encode_sequences_call(call: SequencesCall) -> list[Buffer]:
    """A sequences body as buffers to be sent one after another."""
    tensors = {"index_q": call.index_q}
    if call.query_lens is not None:
        tensors["query_lens"] = np.asarray(call.query_lens, dtype="<i4")
    return encode_container(tensors, {"sequences": ",".join(call.sequences)})


def decode_sequences_call(body: Buffer) -> SequencesCall:
    """Read a sequences body. Its ``index_q`` is a view of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    _check_names(container, {"index_q"}, ("query_lens",), {"sequences"})
    index_q, query_lens = container.tensors["index_q"], container.tensors.get("query_lens")
    if index_q.ndim != 3 or index_q.shape[2] != HEAD_DIM:
        refuse("index_q.shape", list(index_q.shape), f"must be [any, H, {HEAD_DIM}]", "reshape it")
    names = container.metadata["sequences"]
    sequences = tuple(names.split(",")) if names else ()
    if query_lens is None:
        return SequencesCall(index_q, sequences)
    if query_lens.dtype != np.dtype("<i4") or query_lens.shape != (len(sequences),):
        limit = f"must be I32 [{len(sequences)}], one length for each sequence"
        refuse("query_lens", f"{query_lens.dtype} {list(query_lens.shape)}", limit, "write them so")
    return SequencesCall(index_q, sequences, tuple(query_lens.tolist()))


def _check_names(
    container: Container, tensors: set[str], optional: Sequence[str], fields: Collection[str]
) -> None:
    for name in sorted(tensors - container.tensors.keys()):
        refuse(name, "missing", "must be in the body", "write it")
    for name in container.tensors:
        if name not in tensors and name not in optional:
            known = ", ".join((*tensors, *optional))
            refuse("tensor", shown(name), f"must be one of {known}", "leave it out")
    for name in sorted(set(fields) - container.metadata.keys()):
        refuse(f"metadata {name}", "missing", "must be in the body", "write it")
    for name in container.metadata:
        if name not in fields:
            refuse("metadata", shown(name), "must be a field of this body", "leave it out")


# Where a call's time went, as it travels: plain dataclasses that client, server and profiler share.


@dataclass(frozen=True)
class StageMs:
    """A stage of the profiled call, milliseconds over the runs."""

    stage: str
    median_ms: float
    min_ms: float
    max_ms: float


@dataclass(frozen=True)
class Floor:
    """The least time that the device's own measured speed allows.

    Attributes:
        tflops: of a matrix product, TFLOP/s.
        tbps: of a copy, TB/s.
        source: how they were measured.
        compute_ms: the call's work at that speed.
        memory_ms: the call's bytes at that speed.
        bound_by: ``compute`` or ``memory``, the longer one.
    """

    tflops: float
    tbps: float
    source: str
    compute_ms: float
    memory_ms: float
    bound_by: str


@dataclass(frozen=True)
class Profile:
    """Where a call's time goes, beside what the device could do.

    Attributes:
        longest_context: tokens.
        stages: in the order in which they ran.
        device_ms: median of score and top-k together, or of select.
        flop: ``2 * 128 * 128`` for every visible (row, block).
        bytes: queries and each page in use once in, any scores and block ids once out.
        tflops: achieved TFLOP/s.
        tbps: achieved TB/s.
        times_floor: ``device_ms`` over the floor.
        trace: a chrome trace, if one was asked for.
    """

    backend: str
    device: str
    precision: str
    cache: str
    repeats: int
    num_heads: int
    total_q: int
    batch: int
    longest_context: int
    stages: tuple[StageMs, ...]
    device_ms: float
    flop: int
    bytes: int
    tflops: float
    tbps: float
    floor: Floor
    times_floor: float
    trace: dict[str, Any] | None = field(default=None, repr=False)


# The answer to a scoring call: what was selected, by which scores, and how long each stage took.

FORMAT = "nvfp4-indexer-scores"
"""The metadata field ``format`` of a reply."""
VERSION = "1"


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreReply:
    """Selected blocks of every row, in numpy.

    Attributes:
        block_ids: ``[H, total_q, k]`` int32, logical blocks of the row's request; -1 where a row has fewer.
        num_blocks: ``[total_q]`` int32, the causal blocks ``nb`` of each query token.
        scores: ``[H, total_q, S]`` float32, ``-inf`` at and past a row's ``nb``; None when not asked for.
        backend: name of the backend that ran.
        precision: its precision, ``exact`` or ``fast``.
        order: order of the block ids, ``score`` or ``block``.
        timings: seconds of each stage, in order.
    """

    block_ids: Array
    num_blocks: Array
    scores: Array | None
    backend: str
    precision: str
    order: str
    timings: Mapping[str, float] = field(default_factory=dict)


def encode_reply(reply: ScoreReply) -> list[Buffer]:
    """A reply as buffers to be sent one after another; its arrays are not copied."""
    tensors = {"block_ids": reply.block_ids, "num_blocks": reply.num_blocks}
    if reply.scores is not None:
        tensors["scores"] = reply.scores
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "backend": reply.backend,
        "precision": reply.precision,
        "order": reply.order,
        "timings_seconds": json.dumps({name: round(value, 9) for name, value in reply.timings.items()}),
    }
    return encode_container(tensors, metadata)


def decode_reply(body: Buffer) -> ScoreReply:
    """Read a reply from memory. Its arrays are views of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    tensors, metadata = container.tensors, container.metadata
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(name) != wanted:
            _refuse(f"metadata {name}", shown(metadata.get(name)), f"must be {wanted!r}")
    block_ids = _tensor(tensors, "block_ids", np.dtype("<i4"), 3)
    num_blocks = _tensor(tensors, "num_blocks", np.dtype("<i4"), 1)
    scores = _tensor(tensors, "scores", np.dtype("<f4"), 3) if "scores" in tensors else None
    rows = block_ids.shape[:2]
    if num_blocks.shape != rows[1:]:
        _refuse("num_blocks.shape", list(num_blocks.shape), f"must be [{rows[1]}], the tokens of block_ids")
    if scores is not None and scores.shape[:2] != rows:
        _refuse("scores.shape", list(scores.shape), f"must start with {list(rows)}, the rows of block_ids")
    return ScoreReply(
        block_ids=block_ids,
        num_blocks=num_blocks,
        scores=scores,
        backend=metadata.get("backend", ""),
        precision=metadata.get("precision", ""),
        order=metadata.get("order", ""),
        timings=_timings(metadata.get("timings_seconds", "{}")),
    )


def _tensor(tensors: Mapping[str, Array], name: str, dtype: np.dtype[np.generic], dims: int) -> Array:
    array = tensors.get(name)
    if array is None:
        _refuse(name, "missing", "must be in the reply")
    if array.dtype != dtype or array.ndim != dims:
        _refuse(name, f"{array.dtype} {list(array.shape)}", f"must be {dtype} of {dims} dimensions")
    return array


def _timings(text: str) -> dict[str, float]:
    try:
        timings = json.loads(text)
    except (ValueError, RecursionError):
        timings = None
    if not isinstance(timings, dict) or not all(type(value) in (int, float) for value in timings.values()):
        _refuse("metadata timings_seconds", shown(text), "must be a JSON object of numbers")
    return {name: float(value) for name, value in timings.items()}


def _refuse(argument: str, value: object, limit: str) -> NoReturn:
    raise CaseFileError(argument, value, limit, "ask a server of the same version")


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
