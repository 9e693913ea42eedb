"""The OpenAPI document: FastAPI's, and the bodies, answers and errors that no signature shows."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from indexer.wire import BINARY, JSON, PROBLEM, PROBLEM_PREFIX, ProfileReply, ScoreJson
from kernel.contract import HEAD_DIM, PAGE_BYTES
from server.http import OPEN_PATHS
from server.problems import TITLES
from server.wire import CaseJson, KeysJson, SequencesJson

Responses = dict[int | str, dict[str, Any]]
_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "The sparse-attention indexer of MiniMax-M3 over HTTP. Tensors travel as safetensors bodies, small calls "
    "as JSON. Errors are application/problem+json and name the argument. A failed request changes nothing. "
    "Sequences belong to the bearer token that made them."
)


def _member(kind: str, description: str, **more: object) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


_PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "enum": [PROBLEM_PREFIX + kind for kind in TITLES]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": _member("string", "argument = value: limit; remedy"),
        "request_id": {"type": "string"},
        "argument": _member("string", "The argument at fault."),
        "value": {"description": "Its value, shortened."},
        "limit": {"description": "What it must be."},
        "remedy": {"type": "string"},
        "needed_pages": _member("integer", "Pages that the call needs, for out-of-pages."),
        "free_pages": _member("integer", "Pages that are free, for out-of-pages."),
        "missing_pages": _member("integer", "Pages to free, for out-of-pages."),
        "ranks": _member("array", "Ranks that ended, for rank-lost.", items={"type": "integer"}),
        "length": _member("integer", "Tokens that the sequence holds, for length-conflict."),
        "retry_after_seconds": _member("number", "As Retry-After, but finer."),
    },
}

# ---- Bodies ----

_FILE = {"schema": {"type": "string", "format": "binary"}}
_ROW = [0.0] * (HEAD_DIM - 1) + [1.0]


def _body(description: str, model: type, example: object) -> dict[str, Any]:
    return {
        "required": True,
        "description": description,
        "content": {
            BINARY: dict(_FILE),
            JSON: {
                "schema": {"$ref": _REF.format(model=model.__name__)},
                "examples": {"small": {"value": example}},
            },
        },
    }


CASE_BODY = _body(
    f"A case file, a safetensors container: tensors `index_q` [total_q, H, {HEAD_DIM}], `cu_seqlens_q` "
    f"[batch + 1] I32, `seq_lens` [batch] I32, and either `index_k` [total_k, {HEAD_DIM}] or `pages` "
    f"[num_pages, {PAGE_BYTES}] U8 with `block_table` [batch, max_blocks] I32; metadata `format`, `version`, "
    "`init_blocks`, `local_blocks`, `topk`, `source`. Or, for small calls, JSON.",
    CaseJson,
    {"index_q": [[_ROW]], "index_k": [_ROW, _ROW], "topk": 1, "local_blocks": 0},
)
KEYS_BODY = _body(
    f"A safetensors container with one tensor `index_k` [n, {HEAD_DIM}], BF16, F16 or F32, finite. Or JSON.",
    KeysJson,
    {"index_k": [_ROW]},
)
SEQUENCES_BODY = _body(
    f"A safetensors container with `index_q` [total_q, H, {HEAD_DIM}], BF16, F16, F32 or F8_E4M3; optionally "
    "`query_lens` [sequences] I32; and the metadata field `sequences`: ids, separated by commas. Or JSON.",
    SequencesJson,
    {"sequences": ["8d6f3c1a5b7e9024"], "index_q": [[_ROW] * 4]},
)
_JSON_MODELS = (CaseJson, KeysJson, SequencesJson, ScoreJson)
"""Models that bodies and answers refer to by name."""

# ---- Answers ----

_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_TIMING = {"Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds of each stage."}}


def _problem(description: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    problem: dict[str, Any] = {
        "description": description,
        "content": {PROBLEM: {"schema": {"$ref": _REF.format(model="Problem")}}},
    }
    if headers:
        problem["headers"] = headers
    return problem


UNKNOWN_SEQUENCE: Responses = {404: _problem("No such sequence of this token")}
PROBLEM_503: Responses = {
    503: _problem(
        "Warming up, being shut down, too many connections, too little memory, or a rank of the scorer ended",
        _RETRY,
    )
}
_INVALID: Responses = {422: _problem("An argument is outside the contract; it is named")}
_QUEUE: Responses = {
    429: _problem("Every place in the queue is taken; nothing was done", _RETRY),
    504: _problem("The deadline passed before the call began; nothing was done"),
    **PROBLEM_503,
}
_BODY: Responses = {
    413: _problem("The body is too large; it was not read"),
    415: _problem("The body has a type that is not read"),
    **_INVALID,
    **_QUEUE,
}

SCORE_RESPONSES: Responses = {
    200: {
        "description": "Selected blocks: a safetensors container with `block_ids` [H, total_q, k] I32, "
        "`num_blocks` [total_q] I32 and, unless `scores=false`, `scores` [H, total_q, S] F32 (-inf at and "
        "past a row's `num_blocks`); metadata `format`, `version`, `backend`, `precision`, `order`, "
        "`timings_seconds`. Or the same as JSON.",
        "content": {BINARY: dict(_FILE), JSON: {"schema": {"$ref": _REF.format(model="ScoreJson")}}},
        "headers": _TIMING,
    },
    406: _problem("No representation that the request accepts"),
    **_BODY,
}
SCORE_SEQUENCES_RESPONSES: Responses = {**SCORE_RESPONSES, **UNKNOWN_SEQUENCE}
CHANGE_RESPONSES: Responses = {**UNKNOWN_SEQUENCE, **_QUEUE}
MAKE_RESPONSES: Responses = {
    201: {
        "description": "The new sequence",
        "headers": {"Location": {"schema": {"type": "string"}}, **_TIMING},
    },
    409: _problem("No more sequences can be made, of all or of this token"),
    **_QUEUE,
}
KEYS_RESPONSES: Responses = {
    200: {"description": "The sequence as it is now", "headers": _TIMING},
    409: _problem(
        "Too few free pages, too many keys of this token, or the sequence does not hold `start` tokens; "
        "nothing was appended"
    ),
    **UNKNOWN_SEQUENCE,
    **_BODY,
}
PROFILE_RESPONSES: Responses = {
    200: {"description": "Where the time went", "model": ProfileReply, "headers": _TIMING},
    **_BODY,
    504: _problem("The deadline passed before the call began, or between two of its runs"),
}
METRICS_RESPONSES: Responses = {
    200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_UNAUTHORIZED = _problem(
    "A bearer token is needed", {"WWW-Authenticate": {"schema": {"type": "string"}, "description": "Bearer"}}
)
_FORBIDDEN = _problem("Without tokens: the request comes from another site, or names another host")


# ---- Document ----


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Returns the document of an application's routes."""
    document = get_openapi(title="nvfp4-indexer", version="1", description=_DESCRIPTION, routes=app.routes)
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for model in _JSON_MODELS:
        schemas[model.__name__] = TypeAdapter(model).json_schema(ref_template=_REF)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = _PROBLEM_SCHEMA
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # FastAPI adds a validation error of its own to every operation with a parameter.
            found = operation["responses"].get("422")
            if found is not None and JSON in found.get("content", {}):
                del operation["responses"]["422"]
            if path not in OPEN_PATHS:
                operation["security"] = [{"token": []}, {}]
                operation["responses"]["401"] = _UNAUTHORIZED
            operation["responses"]["403"] = _FORBIDDEN
    return document
