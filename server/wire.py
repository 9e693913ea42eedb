"""JSON answers of the routes, as OpenAPI shows them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from indexer.case import Case
from indexer.case.container import Array, Buffer
from indexer.wire import KeysBody, ScoreReply, SequencesCall, encode_reply
from kernel.contract import HEAD_DIM
from server.limits import check_json_reply
from server.problems import ProblemError, invalid


class Alive(BaseModel):
    """The process answers."""

    status: str = Field(examples=["ok"])


class Ready(BaseModel):
    """Kernels are compiled and the self-test against the oracle passed."""

    status: str = Field(examples=["ready"])
    backend: str = Field(examples=["cpu"])
    device: str = Field(examples=["cpu"])


class BackendInfo(BaseModel):
    """Whether a backend can run on the server's machine."""

    name: str = Field(examples=["cpu"])
    usable: bool
    reason: str


class Limits(BaseModel):
    """What a request may be."""

    max_body_bytes: int
    max_json_bytes: int
    max_call_bytes: int = Field(description="Memory for the scores, pages and block tables of one call.")
    max_call_flop: float = Field(
        description="Work of a call: 32,768 flop a row and block, 256 rows' for each page that it reads, "
        "and 768 rows' for each request."
    )
    max_connections: int
    max_sequences: int
    max_sequences_per_token: int | None
    max_keys_per_token: int | None = Field(description="Keys of one bearer token's sequences together.")
    sequence_ttl_seconds: float | None = Field(description="Time after which an unused sequence is dropped.")
    queue_places: int
    queue_bytes: int
    deadline_seconds: float


class Info(BaseModel):
    """What serves."""

    version: str = Field(examples=["0.1.0"])
    backend: str = Field(examples=["cpu"])
    device: str = Field(examples=["cpu"])
    device_name: str = Field(examples=["AMD Instinct MI355X"])
    precision: str = Field(examples=["exact"])
    num_index_heads: int = Field(description="Index heads of queries to sequences.", examples=[4])
    num_pages: int
    page_bytes: int = Field(examples=[9216])
    block_tokens: int = Field(examples=[128])
    head_dim: int = Field(examples=[128])
    topk: int = Field(description="Blocks selected when a call on sequences does not say.")
    init_blocks: int
    local_blocks: int
    order: str
    limits: Limits
    backends: list[BackendInfo] = Field(description="Every backend, best first.")


class SequenceInfo(BaseModel):
    """A live sequence."""

    id: str = Field(examples=["8d6f3c1a5b7e9024"])
    length: int = Field(description="Tokens.", examples=[8192])
    blocks: int = Field(description="Blocks, each of them a page.", examples=[64])


class CacheInfo(BaseModel):
    """Occupancy of the paged cache. Pages count for everyone, sequences are those of the token that asks."""

    num_pages: int
    free_pages: int
    used_pages: int
    page_bytes: int
    total_sequences: int = Field(description="Live sequences of all tokens.")
    sequences: list[SequenceInfo]


class RouteLatency(BaseModel):
    """Latencies of a route's last calls."""

    route: str
    calls: int
    p50_ms: float
    p99_ms: float


class CallHead(BaseModel):
    """One index head's part of the score map."""

    cells: str = Field(description="Base64, one byte a cell: 0 past nb, 1..254 the score's rank, 255 forced.")
    selected: list[list[int]] = Field(description="Columns that each row selected.")


class CallMap(BaseModel):
    """A call's scores and selection, some rows and blocks of it."""

    title: str
    backend: str
    timings_ms: dict[str, float]
    tokens: list[int] = Field(description="Query token of each row.")
    num_blocks: int
    blocks_a_column: int
    columns: int
    has_scores: bool
    heads: list[CallHead]


class Activity(BaseModel):
    """What the page shows."""

    waiting: int = Field(description="Calls that wait for the device.")
    busy: bool
    places_taken: int
    places: int
    uptime_seconds: float
    latencies: list[RouteLatency]
    last_call: CallMap | None = Field(description="Of the token that asks.")


class ScoreJson(BaseModel):
    """A scoring call's answer in JSON."""

    block_ids: list[list[list[int]]] = Field(description="`[H, total_q, k]`; -1 past a row's blocks.")
    num_blocks: list[int] = Field(description="`[total_q]` causal blocks of each query token.")
    scores: list[list[list[float | None]]] | None = Field(
        description="`[H, total_q, S]`; null at and past a row's `num_blocks`."
    )
    backend: str
    precision: str
    order: str
    timings_seconds: dict[str, float]


class StageMs(BaseModel):
    """A stage of the profiled call, milliseconds over the runs."""

    stage: str
    median_ms: float
    min_ms: float
    max_ms: float


class Floor(BaseModel):
    """The least time that this device's own measured speed allows."""

    tflops: float = Field(description="Matrix product, TFLOP/s.")
    tbps: float = Field(description="Copy, TB/s.")
    source: str
    compute_ms: float
    memory_ms: float
    bound_by: str = Field(examples=["memory"])


class Profile(BaseModel):
    """Where a call's time goes, beside what the device could do."""

    backend: str
    device: str
    precision: str
    cache: str
    repeats: int
    num_heads: int
    total_q: int
    batch: int
    longest_context: int = Field(description="Tokens.")
    stages: list[StageMs]
    device_ms: float = Field(description="Median of score and top-k together, or of select.")
    flop: int = Field(description="2 * 128 * 128 for every visible (row, block).")
    bytes: int = Field(description="Queries and each page in use once in, scores and block ids once out.")
    tflops: float = Field(description="Achieved TFLOP/s.")
    tbps: float = Field(description="Achieved TB/s.")
    floor: Floor
    times_floor: float = Field(description="device_ms over the floor.")


class ProfileReply(Profile):
    """A profile, with a trace if one was asked for."""

    trace: dict[str, object] | None = Field(default=None, description="Chrome trace: open it in Perfetto.")


# Which form a body has, and which one the answer is to have.

Form = Literal["application/octet-stream", "application/json"]
BINARY: Final = "application/octet-stream"
JSON: Final = "application/json"
_QUALITY = re.compile(r"(0(\.\d{0,3})?|1(\.0{0,3})?)", re.ASCII)


def form_of_body(request: Request) -> Form:
    """The form that a request's ``Content-Type`` names.

    Raises:
        ProblemError: 415, another one, or a compressed body.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise _unsupported("Content-Encoding", encoding, "send the body as it is")
    given = request.headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type == BINARY:
        return BINARY
    if media_type == JSON:
        return JSON
    raise _unsupported("Content-Type", given, f"send {BINARY} (safetensors) or {JSON}")


def form_of_reply(request: Request, body: Form) -> Form:
    """The form that a request's ``Accept`` asks for; the body's where it leaves the choice.

    Raises:
        ProblemError: 406, neither.
    """
    accept = ",".join(request.headers.getlist("accept"))
    if accept in ("", "*/*"):
        return body
    binary, json = _preference(accept, BINARY), _preference(accept, JSON)
    if not max(binary, json)[0]:
        raise ProblemError(
            406, "not-acceptable", f"accept {BINARY} or {JSON}", argument="Accept", value=accept[:200]
        )
    if binary == json:
        return body
    return BINARY if binary > json else JSON


def _preference(accept: str, form: Form) -> tuple[float, int]:
    """The quality that the closest range of ``Accept`` gives a form, and how close it is; 0: not accepted."""
    quality, closeness = 0.0, 0
    for part in accept.split(","):
        name, *parameters = (text.strip().lower() for text in part.split(";"))
        close = {form: 3, "application/*": 2, "*/*": 1}.get(name, 0)
        if close > closeness:
            values = [text.removeprefix("q=") for text in parameters if text.startswith("q=")]
            quality = _quality(values[0]) if values else 1.0
            closeness = close
    return quality, closeness


def _quality(text: str) -> float:
    return float(text) if _QUALITY.fullmatch(text) else 0.0


def _unsupported(header: str, value: str, remedy: str) -> ProblemError:
    return ProblemError(
        415,
        "unsupported-media-type",
        f"{header} = {value[:100]!r}: not read here; {remedy}",
        argument=header,
        value=value[:200],
    )


# Small calls as JSON: the tensors of the binary forms as nested lists of numbers.

_Model = TypeVar("_Model", bound="_StrictModel")
_Queries = list[list[list[float]]]
_Keys = list[list[float]]
_INT32 = 2**31 - 1


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CaseJson(_StrictModel):
    """One scoring call. Several requests: their queries and keys one after another, and their lengths."""

    index_q: _Queries = Field(description="`[total_q, H, 128]`, H 1, 2 or 4; cast to E4M3, saturating.")
    index_k: _Keys = Field(description="`[total_k, 128]`; quantised to NVFP4.")
    seq_lens: list[int] | None = Field(
        default=None, description="`[batch]` keys of each request; left out: one request has all."
    )
    cu_seqlens_q: list[int] | None = Field(
        default=None,
        description="`[batch + 1]` exclusive prefix sum of the query lengths; left out: one request.",
    )
    init_blocks: int = Field(default=0, ge=0, le=10**9 - 1, description="Blocks forced at a row's start.")
    local_blocks: int = Field(default=1, ge=0, le=10**9 - 1, description="Blocks forced at a row's end.")
    topk: int = Field(default=16, ge=1, le=64, description="Blocks a row selects.")


class KeysJson(_StrictModel):
    """Keys to append."""

    index_k: _Keys = Field(description="`[n, 128]`; quantised to NVFP4.")


class SequencesJson(_StrictModel):
    """Queries for the last positions of some sequences."""

    sequences: list[str] = Field(description="Ids, in the order of their rows in `index_q`.")
    index_q: _Queries = Field(description="`[total_q, H, 128]`; cast to E4M3, saturating.")
    query_lens: list[int] | None = Field(
        default=None, description="Queries of each sequence; left out: one each, or all of the only one."
    )


def case_of_json(body: bytearray) -> Case:
    """Read a call.

    Raises:
        ProblemError: 422, naming the member.
        CaseFileError: the case is outside the contract.
    """
    given = _parsed(CaseJson, body)
    index_q = _array("index_q", given.index_q, (-1, 1, HEAD_DIM))
    index_k = _array("index_k", given.index_k, (-1, HEAD_DIM))
    return Case(
        index_q=index_q,
        index_k=index_k,
        seq_lens=_integers("seq_lens", [len(given.index_k)] if given.seq_lens is None else given.seq_lens),
        cu_seqlens_q=_integers(
            "cu_seqlens_q", [0, len(given.index_q)] if given.cu_seqlens_q is None else given.cu_seqlens_q
        ),
        init_blocks=given.init_blocks,
        local_blocks=given.local_blocks,
        topk=given.topk,
    )


def keys_of_json(body: bytearray) -> KeysBody:
    """Read keys.

    Raises:
        ProblemError: 422, naming the member.
    """
    return KeysBody(_array("index_k", _parsed(KeysJson, body).index_k, (-1, HEAD_DIM)))


def sequences_call_of_json(body: bytearray, num_heads: int) -> SequencesCall:
    """Read a call on sequences. Lists without a query do not tell the heads, which are then ``num_heads``.

    Raises:
        ProblemError: 422, naming the member.
    """
    given = _parsed(SequencesJson, body)
    query_lens = None if given.query_lens is None else tuple(given.query_lens)
    index_q = _array("index_q", given.index_q, (-1, num_heads, HEAD_DIM))
    return SequencesCall(index_q, tuple(given.sequences), query_lens)


def argument_name(location: tuple[int | str, ...]) -> str:
    """``("index_q", 0, 1)`` as ``index_q[0, 1]``."""
    name = ".".join(part for part in location if isinstance(part, str))
    places = [str(part) for part in location if isinstance(part, int)]
    return f"{name}[{', '.join(places)}]" if places else name or "body"


def _parsed(model: type[_Model], body: bytearray) -> _Model:
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=True)[0]
        argument = argument_name(first["loc"])
        raise invalid(argument, _value_of(first), first["msg"], "see /openapi.json") from error


def _value_of(error: ErrorDetails) -> str:
    """The value that is at fault, for a message."""
    given = error["input"]
    if error["type"] == "missing":  # the input is what should hold it
        return "not given"
    return ascii(given)[:100] if isinstance(given, (int, float, str)) else type(given).__name__


def _array(name: str, values: list[Any], empty: tuple[int, ...]) -> Array:
    """The lists as float32, of the shape that ``empty`` says (-1: none) when they hold nothing."""
    if not values:
        return np.zeros([max(size, 0) for size in empty], dtype=np.float32)
    try:
        with np.errstate(over="ignore"):  # an infinity is refused by name where finiteness is checked
            return np.array(values, dtype=np.float32)
    except ValueError as error:
        raise invalid(name, "lists", "must have lists of one length", "make them a full tensor") from error


def _integers(name: str, values: list[int]) -> Array:
    for place, value in enumerate(values):
        if not -_INT32 <= value <= _INT32:
            raise invalid(f"{name}[{place}]", str(value)[:40], "must fit 32 bits", "correct it")
    return np.array(values, dtype=np.int32)


# Answers to scoring calls: encoded on the device's thread, sent from the memory they are in.

_CHUNK_BYTES = 1 << 20


def encoded(reply: ScoreReply, form: Form) -> list[Buffer]:
    """A reply as the buffers of a body.

    Raises:
        ProblemError: 422, it is too large for JSON.
    """
    return encode_reply(reply) if form == BINARY else [_json(reply)]


def server_timing(stages: Mapping[str, float]) -> dict[str, str]:
    """The ``Server-Timing`` header of stages in seconds; it counts in milliseconds."""
    return {"Server-Timing": ", ".join(f"{name};dur={1e3 * value:.3f}" for name, value in stages.items())}


class BuffersResponse(Response):
    """A body of several buffers.

    Args:
        buffers: the body; they must not change any more.
        form: its media type.
        headers: further headers.
        send_seconds: time for the client to take it; afterwards the connection is closed.
    """

    def __init__(
        self, buffers: Sequence[Buffer], form: Form, headers: Mapping[str, str], send_seconds: float
    ) -> None:
        length = sum(len(buffer) for buffer in buffers)
        super().__init__(b"", 200, {**headers, "content-length": str(length)}, media_type=form)
        self._buffers = buffers
        self._length = length
        self._send_seconds = send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._length <= _CHUNK_BYTES:
            # One write that the socket's buffer takes: nothing to wait for.
            await send({"type": "http.response.body", "body": b"".join(self._buffers)})
        else:
            await asyncio.wait_for(self._send(send), self._send_seconds)

    async def _send(self, send: Send) -> None:
        for buffer in self._buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _json(reply: ScoreReply) -> bytes:
    check_json_reply(reply.block_ids.size)
    content: dict[str, Any] = {
        "block_ids": reply.block_ids.tolist(),
        "num_blocks": reply.num_blocks.tolist(),
        "scores": None,
        "backend": reply.backend,
        "precision": reply.precision,
        "order": reply.order,
        "timings_seconds": dict(reply.timings),
    }
    if reply.scores is not None:
        check_json_reply(reply.scores.size)
        content["scores"] = _nullable(reply.scores)
    return json.dumps(content, allow_nan=False).encode()


def _nullable(scores: Array) -> Any:
    """Nested lists with None for ``-inf``, which JSON has no number for."""
    values = scores.astype(object)
    values[np.isneginf(scores)] = None
    return values.tolist()
