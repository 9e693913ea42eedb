"""Requests and answers in the server: media types, JSON bodies, encoded answers.

The body and the answer of a call are safetensors or, for small calls, JSON with the same tensors as nested
lists. The records are in :mod:`indexer.wire`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from indexer.case import Case, decode_case
from indexer.case.case import MAX_FORCED_BLOCKS
from indexer.case.container import Array, Buffer
from indexer.wire import (
    BINARY,
    JSON,
    Form,
    ScoreJson,
    ScoreReply,
    SequencesCall,
    decode_keys,
    decode_sequences_call,
    encode_reply,
)
from kernel.contract import HEAD_DIM, MAX_TOPK
from server.limits import check_json_reply
from server.problems import ProblemError, invalid

# ---- Media types ----

_QUALITY = re.compile(r"(0(\.\d{0,3})?|1(\.0{0,3})?)", re.ASCII)


def form_of_body(request: Request) -> Form:
    """Returns the form that a request's ``Content-Type`` names.

    Raises:
        ProblemError: 415, another one, or a compressed body.
    """
    encodings = ", ".join(request.headers.getlist("content-encoding"))
    if not all(name.strip().lower() in ("", "identity") for name in encodings.split(",")):
        raise _unsupported("Content-Encoding", encodings, "send the body as it is")
    given = ", ".join(request.headers.getlist("content-type"))
    media_type = given.partition(";")[0].strip().lower()
    if media_type == BINARY:
        return BINARY
    if media_type == JSON:
        return JSON
    raise _unsupported("Content-Type", given, f"send {BINARY} (safetensors) or {JSON}")


def form_of_reply(request: Request, body: Form) -> Form:
    """Returns the form that a request's ``Accept`` asks for; the body's where it leaves the choice.

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
    """Returns the quality that the most specific range of ``Accept`` gives a form (0: not accepted), and how
    specific that range is."""
    quality, specificity = 0.0, 0
    for part in accept.split(","):
        name, *parameters = (text.strip().lower() for text in part.split(";"))
        found = {form: 3, "application/*": 2, "*/*": 1}.get(name, 0)
        if found > specificity:
            text = next((text[2:] for text in parameters if text.startswith("q=")), "1")
            quality = float(text) if _QUALITY.fullmatch(text) else 0.0
            specificity = found
    return quality, specificity


def _unsupported(header: str, value: str, remedy: str) -> ProblemError:
    return ProblemError(
        415,
        "unsupported-media-type",
        f"{header} = {value[:100]!r}: not read here; {remedy}",
        argument=header,
        value=value[:200],
    )


# ---- Bodies ----

_Model = TypeVar("_Model", bound="_StrictModel")
_Queries = list[list[list[float]]]
_Keys = list[list[float]]
_INT32 = 2**31 - 1
_SHOWN_BYTES = 30
"""Of a body that is no JSON, up to where it is wrong."""
_Integers = list[Annotated[int, Field(ge=-_INT32, le=_INT32)]]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CaseJson(_StrictModel):
    """One scoring call. Several requests: their queries and keys one after another, and their lengths."""

    index_q: _Queries = Field(
        description=f"`[total_q, H, {HEAD_DIM}]`, H 1, 2 or 4; cast to E4M3, saturating."
    )
    index_k: _Keys = Field(description=f"`[total_k, {HEAD_DIM}]`; quantised to NVFP4.")
    seq_lens: _Integers | None = Field(
        default=None, description="`[batch]` keys of each request; left out: one request has all."
    )
    cu_seqlens_q: _Integers | None = Field(
        default=None,
        description="`[batch + 1]` exclusive prefix sum of the query lengths; left out: one request.",
    )
    init_blocks: int = Field(
        default=0, ge=0, le=MAX_FORCED_BLOCKS, description="Blocks forced at a row's start."
    )
    local_blocks: int = Field(
        default=1, ge=0, le=MAX_FORCED_BLOCKS, description="Blocks forced at a row's end."
    )
    topk: int = Field(default=16, ge=1, le=MAX_TOPK, description="Blocks a row selects.")


class KeysJson(_StrictModel):
    """Keys to append."""

    index_k: _Keys = Field(description=f"`[n, {HEAD_DIM}]`; quantised to NVFP4.")


class SequencesJson(_StrictModel):
    """Queries for the last positions of some sequences."""

    sequences: list[str] = Field(description="Ids, in the order of their rows in `index_q`.")
    index_q: _Queries = Field(description=f"`[total_q, H, {HEAD_DIM}]`; cast to E4M3, saturating.")
    query_lens: _Integers | None = Field(
        default=None, description="Queries of each sequence; left out: one each, or all of the only one."
    )


def case_of_body(body: bytearray, form: Form) -> Case:
    """Reads a case.

    Raises:
        ProblemError: 422, naming the member of a JSON body.
        CaseFileError: the case is outside the contract.
    """
    if form == BINARY:
        return decode_case(body)
    given = _parsed(CaseJson, body)
    index_q = _array("index_q", given.index_q, (0, 1, HEAD_DIM))
    index_k = _array("index_k", given.index_k, (0, HEAD_DIM))
    return Case(
        index_q=index_q,
        index_k=index_k,
        seq_lens=np.array([len(index_k)] if given.seq_lens is None else given.seq_lens, dtype=np.int32),
        cu_seqlens_q=np.array(
            [0, len(index_q)] if given.cu_seqlens_q is None else given.cu_seqlens_q, dtype=np.int32
        ),
        init_blocks=given.init_blocks,
        local_blocks=given.local_blocks,
        topk=given.topk,
    )


def keys_of_body(body: bytearray, form: Form) -> Array:
    """Reads keys ``[n, 128]``.

    Raises:
        ProblemError: 422, naming the member of a JSON body.
        CaseFileError: the container is not one of keys.
    """
    if form == BINARY:
        return decode_keys(body)
    return _array("index_k", _parsed(KeysJson, body).index_k, (0, HEAD_DIM))


def sequences_call_of_body(body: bytearray, form: Form, num_heads: int) -> SequencesCall:
    """Reads a call on sequences. JSON without a query does not tell the heads, which are then ``num_heads``.

    Raises:
        ProblemError: 422, naming the member of a JSON body.
        CaseFileError: the container is not one of a call on sequences.
    """
    if form == BINARY:
        return decode_sequences_call(body)
    given = _parsed(SequencesJson, body)
    query_lens = None if given.query_lens is None else tuple(given.query_lens)
    index_q = _array("index_q", given.index_q, (0, num_heads, HEAD_DIM))
    return SequencesCall(index_q, tuple(given.sequences), query_lens)


def argument_name(location: tuple[int | str, ...]) -> str:
    """Returns ``index_q[0, 1]`` for ``("index_q", 0, 1)``."""
    name = ".".join(part for part in location if isinstance(part, str))
    indices = [str(part) for part in location if isinstance(part, int)]
    return f"{name}[{', '.join(indices)}]" if indices else name or "body"


def _parsed(model: type[_Model], body: bytearray) -> _Model:
    text = bytes(body)
    try:
        found = model.model_validate_json(text)
        # The last of two members would win. Numbers stay text, which costs least.
        json.loads(text, object_pairs_hook=_check_members, parse_int=str, parse_float=str)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=True)[0]
        if first["type"] == "json_invalid":
            raise _no_json(text, first["msg"]) from error
        argument = argument_name(first["loc"])
        raise invalid(argument, _value_of(first), first["msg"], "see /openapi.json") from error


def _check_members(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(ascii(twice)[1:-1][:60], "two values", "must be given once", "leave the other out")


def _no_json(text: bytes, message: str) -> ProblemError:
    """Returns the refusal of a body that is no JSON, with what stands where reading it ended."""
    if text.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return invalid("body", "a byte order mark", "must be JSON in UTF-8", "encode it without the mark")
    reason, at, place = message.removeprefix("Invalid JSON: ").rpartition(" at line ")
    line, _, column = place.partition(" column ")
    shown = text[:_SHOWN_BYTES]
    if at:
        end = int(column)
        shown = text.split(b"\n")[int(line) - 1][max(end - _SHOWN_BYTES, 0) : end]
        reason = f"{reason}{at}{place}"
    value = ascii(shown.decode(errors="replace")) if text else "nothing"
    return invalid("body", value, f"must be JSON: {reason}", "see /openapi.json")


def _value_of(error: ErrorDetails) -> str:
    """Returns the value at fault for a message, as JSON has it."""
    given = error["input"]
    if error["type"] == "missing":  # the input is what should hold it
        return "not given"
    if isinstance(given, (dict, list)):
        return "an object" if isinstance(given, dict) else "an array"
    return json.dumps(given)[:100]


def _array(name: str, values: list[Any], empty: tuple[int, ...]) -> Array:
    """Returns the lists as float32, of shape ``empty`` when they hold nothing."""
    if not values:
        return np.zeros(empty, dtype=np.float32)
    try:
        with np.errstate(over="ignore"):  # an infinity is refused by name where finiteness is checked
            return np.array(values, dtype=np.float32)
    except ValueError as error:
        raise invalid(name, "lists", "must have lists of one length", "make them a full tensor") from error


# ---- Answers ----

_CHUNK_BYTES = 1 << 20


def json_response(record: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a record as a JSON answer."""
    return Response(to_json(record), status, headers, media_type=JSON)


def server_timing(stages: Mapping[str, float]) -> dict[str, str]:
    """Returns the ``Server-Timing`` header of stages in seconds; it counts in milliseconds."""
    return {"Server-Timing": ", ".join(f"{name};dur={1e3 * value:.3f}" for name, value in stages.items())}


def encoded(reply: ScoreReply, form: Form) -> list[Buffer]:
    """Returns a reply as the buffers of a body.

    Raises:
        ProblemError: 422, it is too large for JSON.
    """
    if form == BINARY:
        return encode_reply(reply)
    check_json_reply(reply.block_ids.size)
    scores = None
    if reply.scores is not None:
        check_json_reply(reply.scores.size)
        nullable = reply.scores.astype(object)
        nullable[np.isneginf(reply.scores)] = None  # JSON has no number for -inf
        scores = nullable.tolist()
    answer = ScoreJson(
        block_ids=reply.block_ids.tolist(),
        num_blocks=reply.num_blocks.tolist(),
        scores=scores,
        backend=reply.backend,
        precision=reply.precision,
        order=reply.order,
        timings_seconds=dict(reply.timings),
    )
    # Not with json, which would keep every other thread waiting for a quarter of a second.
    return [to_json(answer, inf_nan_mode="constants")]


class BuffersResponse(Response):
    """A body of several buffers, sent from the memory that they are in.

    Args:
        buffers: the body; they must not change any more.
        form: its media type.
        headers: further headers.
    """

    def __init__(self, buffers: Sequence[Buffer], form: Form, headers: Mapping[str, str]) -> None:
        length = sum(len(buffer) for buffer in buffers)
        super().__init__(b"", 200, {**headers, "content-length": str(length)}, media_type=form)
        self._buffers = buffers
        self._length = length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._length <= _CHUNK_BYTES:
            await send({"type": "http.response.body", "body": b"".join(self._buffers)})
            return
        for buffer in self._buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
