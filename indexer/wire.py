"""Everything that travels over HTTP beside case files, defined once for server and client.

JSON answers are frozen dataclasses; OpenAPI shows their docstrings and field metadata. Tensors travel as
safetensors containers, read by the same strict decoder as case files. Imports neither torch nor pydantic.

    keys body       tensor ``index_k``
    sequences body  tensors ``index_q``, optionally ``query_lens``; metadata ``sequences``: ids, by commas
    score reply     tensors ``block_ids``, ``num_blocks``, optionally ``scores``; metadata as in ScoreReply
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

import numpy as np

from indexer.case.container import Array, Buffer, Container, decode_container, encode_container, refuse, shown
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.errors import CaseFileError

Form = Literal["application/octet-stream", "application/json"]
"""Media types of bodies and answers: a safetensors container, or JSON."""
BINARY: Final = "application/octet-stream"
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
"""Media type of errors (RFC 9457)."""
PROBLEM_PREFIX = "urn:nvfp4-indexer:problem:"
"""Start of every problem's ``type``; the rest is its kind."""


# ---- JSON answers ----


def described(description: str | None = None, *examples: object) -> dict[str, Any]:
    """Returns the metadata of a record's field: what OpenAPI shows of it."""
    metadata: dict[str, Any] = {"description": description} if description else {}
    return {**metadata, "examples": list(examples)} if examples else metadata


@dataclass(frozen=True)
class Alive:
    """The process answers."""

    status: str = field(metadata=described(None, "ok"))


@dataclass(frozen=True)
class Ready:
    """Kernels are compiled and the self-test against the oracle passed."""

    status: str = field(metadata=described(None, "ready"))
    backend: str = field(metadata=described(None, "cpu"))
    device: str = field(metadata=described(None, "cpu"))


@dataclass(frozen=True)
class BackendInfo:
    """Whether a backend can run on the server's machine."""

    name: str = field(metadata=described(None, "cpu"))
    usable: bool
    reason: str


@dataclass(frozen=True)
class Limits:
    """What a request may be."""

    max_body_bytes: int
    max_json_bytes: int
    max_call_bytes: int = field(
        metadata=described("Memory for the scores, pages and block tables of one call.")
    )
    max_call_flop: float = field(
        metadata=described(
            "Work of a call: 32,768 flop a row and block, 256 rows' for each page that it reads, "
            "and 768 rows' for each request."
        )
    )
    max_connections: int
    max_sequences: int
    max_sequences_per_token: int | None
    max_keys_per_token: int | None = field(
        metadata=described("Keys of one bearer token's sequences together.")
    )
    sequence_ttl_seconds: float | None = field(
        metadata=described("Time after which an unused sequence is dropped.")
    )
    queue_places: int
    queue_bytes: int
    deadline_seconds: float


@dataclass(frozen=True)
class Info:
    """What serves."""

    version: str = field(metadata=described(None, "0.1.0"))
    backend: str = field(metadata=described(None, "cpu"))
    device: str = field(metadata=described(None, "cpu"))
    device_name: str = field(metadata=described(None, "AMD Instinct MI355X"))
    precision: str = field(metadata=described(None, "exact"))
    num_index_heads: int = field(metadata=described("Index heads of queries to sequences.", 4))
    num_pages: int
    page_bytes: int = field(metadata=described(None, PAGE_BYTES))
    block_tokens: int = field(metadata=described(None, BLOCK_TOKENS))
    head_dim: int = field(metadata=described(None, HEAD_DIM))
    topk: int = field(metadata=described("Blocks selected when a call on sequences does not say."))
    init_blocks: int
    local_blocks: int
    order: str
    limits: Limits
    backends: tuple[BackendInfo, ...] = field(metadata=described("Every backend, best first."))


@dataclass(frozen=True)
class SequenceInfo:
    """A live sequence."""

    id: str = field(metadata=described(None, "8d6f3c1a5b7e9024"))
    length: int = field(metadata=described("Tokens.", 8192))
    blocks: int = field(metadata=described("Blocks, each of them a page.", 64))


@dataclass(frozen=True)
class CacheInfo:
    """Occupancy of the paged cache. Pages count for everyone, sequences are those of the token that asks."""

    num_pages: int
    free_pages: int
    used_pages: int
    page_bytes: int
    total_sequences: int = field(metadata=described("Live sequences of all tokens."))
    sequences: tuple[SequenceInfo, ...]


@dataclass(frozen=True)
class RouteLatency:
    """Latencies of a route's last calls."""

    route: str
    calls: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class CallHead:
    """One index head's part of the score map."""

    cells: str = field(
        metadata=described("Base64, one byte a cell: 0 past nb, 1..254 the score's rank, 255 forced.")
    )
    selected: list[list[int]] = field(metadata=described("Columns that each row selected."))


@dataclass(frozen=True)
class CallMap:
    """A call's scores and selection, some rows and blocks of it."""

    title: str
    backend: str
    timings_ms: dict[str, float]
    tokens: list[int] = field(metadata=described("Query token of each row."))
    num_blocks: int
    blocks_a_column: int
    columns: int
    has_scores: bool
    heads: list[CallHead]


@dataclass(frozen=True)
class Activity:
    """What the page shows."""

    waiting: int = field(metadata=described("Calls that wait for the device."))
    busy: bool
    places_taken: int
    places: int
    uptime_seconds: float
    latencies: list[RouteLatency]
    last_call: CallMap | None = field(metadata=described("Of the token that asks."))


@dataclass(frozen=True)
class ScoreJson:
    """A scoring call's answer in JSON."""

    block_ids: list[list[list[int]]] = field(metadata=described("`[H, total_q, k]`; -1 past a row's blocks."))
    num_blocks: list[int] = field(metadata=described("`[total_q]` causal blocks of each query token."))
    scores: list[list[list[float | None]]] | None = field(
        metadata=described("`[H, total_q, S]`; null at and past a row's `num_blocks`.")
    )
    backend: str
    precision: str
    order: str
    timings_seconds: dict[str, float]


@dataclass(frozen=True)
class StageMs:
    """A stage of the profiled call, milliseconds over the runs."""

    stage: str
    median_ms: float
    min_ms: float
    max_ms: float


@dataclass(frozen=True)
class Floor:
    """The least time that this device's own measured speed allows."""

    tflops: float = field(metadata=described("Matrix product, TFLOP/s."))
    tbps: float = field(metadata=described("Copy, TB/s."))
    source: str  # how they were measured
    compute_ms: float
    memory_ms: float
    bound_by: str = field(metadata=described(None, "memory"))  # or compute: the longer of the two times


@dataclass(frozen=True)
class Profile:
    """Where a call's time goes, beside what the device could do."""

    backend: str
    device: str
    precision: str
    cache: str
    repeats: int
    num_heads: int
    total_q: int
    batch: int
    longest_context: int = field(metadata=described("Tokens."))
    stages: tuple[StageMs, ...]  # in the order in which they ran
    device_ms: float = field(metadata=described("Median of score and top-k together, or of select."))
    flop: int = field(metadata=described("2 * 128 * 128 for every visible (row, block)."))
    bytes: int = field(
        metadata=described("Queries and each page in use once in, scores and block ids once out.")
    )
    tflops: float = field(metadata=described("Achieved TFLOP/s."))
    tbps: float = field(metadata=described("Achieved TB/s."))
    floor: Floor
    times_floor: float = field(metadata=described("device_ms over the floor."))
    trace: dict[str, Any] | None = field(
        default=None, repr=False, metadata=described("Chrome trace: open it in Perfetto.")
    )


@dataclass(frozen=True)
class ProfileReply(Profile):
    """A profile, with a trace if one was asked for."""


# ---- Bodies of the calls on sequences ----


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
    """Encodes a keys body as buffers to be sent one after another."""
    return encode_container({"index_k": index_k}, {})


def decode_keys(body: Buffer) -> Array:
    """Reads ``index_k`` ``[n, 128]`` bfloat16, float16 or float32 from a keys body, as a view of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    _check_names(container, {"index_k"}, (), set())
    index_k = container.tensors["index_k"]
    if index_k.ndim != 2 or index_k.shape[1] != HEAD_DIM:
        refuse("index_k.shape", list(index_k.shape), f"must be [any, {HEAD_DIM}]", "write one key a row")
    return index_k


def encode_sequences_call(call: SequencesCall) -> list[Buffer]:
    """Encodes a sequences body as buffers to be sent one after another."""
    tensors = {"index_q": call.index_q}
    if call.query_lens is not None:
        tensors["query_lens"] = np.asarray(call.query_lens, dtype="<i4")
    return encode_container(tensors, {"sequences": ",".join(call.sequences)})


def decode_sequences_call(body: Buffer) -> SequencesCall:
    """Reads a sequences body. Its ``index_q`` is a view of ``body``.

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


# ---- Score replies ----

_FORMAT, _VERSION = "nvfp4-indexer-scores", "1"
"""Metadata fields ``format`` and ``version``."""


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
    """Encodes a reply as buffers to be sent one after another; its arrays are not copied."""
    tensors = {"block_ids": reply.block_ids, "num_blocks": reply.num_blocks}
    if reply.scores is not None:
        tensors["scores"] = reply.scores
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "backend": reply.backend,
        "precision": reply.precision,
        "order": reply.order,
        "timings_seconds": json.dumps({name: round(value, 9) for name, value in reply.timings.items()}),
    }
    return encode_container(tensors, metadata)


def decode_reply(body: Buffer) -> ScoreReply:
    """Reads a reply. Its arrays are views of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    tensors, metadata = container.tensors, container.metadata
    for name, wanted in (("format", _FORMAT), ("version", _VERSION)):
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
