"""JSON answers of the server as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from client.errors import BadReplyError

R = TypeVar("R")


@dataclass(frozen=True)
class Health:
    """What a process that answers says: ``ok``. It may not be ready."""

    status: str


@dataclass(frozen=True)
class Readiness:
    """What a server that passed its self-test says."""

    status: str
    backend: str
    device: str


@dataclass(frozen=True)
class SequenceState:
    """A live sequence: its id, its tokens, and its blocks, each of them a page."""

    id: str
    length: int
    blocks: int


@dataclass(frozen=True)
class CacheState:
    """Occupancy of the paged cache. Pages count for everyone, sequences are those of this client's token."""

    num_pages: int
    free_pages: int
    used_pages: int
    page_bytes: int
    total_sequences: int
    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True)
class BackendState:
    """Whether a backend can run on the server's machine, and why not."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True)
class ServerLimits:
    """What a request may be: bytes, sequences, places, seconds."""

    max_body_bytes: int
    max_json_bytes: int
    max_call_bytes: int
    max_sequences: int
    queue_places: int
    deadline_seconds: float


@dataclass(frozen=True)
class ServerInfo:
    """What serves: backend, device, geometry, defaults, limits."""

    version: str
    backend: str
    device: str
    device_name: str
    precision: str
    num_index_heads: int
    num_pages: int
    page_bytes: int
    block_tokens: int
    head_dim: int
    topk: int
    init_blocks: int
    local_blocks: int
    order: str
    limits: ServerLimits
    backends: tuple[BackendState, ...]


@dataclass(frozen=True)
class StageMs:
    """A stage of the profiled call, milliseconds over the runs."""

    stage: str
    median_ms: float
    min_ms: float
    max_ms: float


@dataclass(frozen=True)
class Floor:
    """The least time that the device's own measured speed allows."""

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


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""Validators, each built at its first use: that takes longer than any answer's reading."""


def record(kind: type[R], body: bytes | bytearray) -> R:
    """Read an answer. Members that this client does not know are left out.

    Raises:
        BadReplyError: a member is missing or of another type.
    """
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    adapter: TypeAdapter[R] = _adapters[kind]
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise BadReplyError(
            f"{where}: {first['msg']}; ask a server of this version, at the URL of its root"
        ) from error
