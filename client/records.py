"""JSON answers of the server as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
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
    """What a request may be: bytes, flop, connections, sequences, keys, places, seconds; None: no limit."""

    max_body_bytes: int
    max_json_bytes: int
    max_call_bytes: int
    max_call_flop: float
    max_connections: int
    max_sequences: int
    max_sequences_per_token: int | None
    max_keys_per_token: int | None
    sequence_ttl_seconds: float | None
    queue_places: int
    queue_bytes: int
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
