"""An error answer of the server as the exception that an in-process call would raise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from client.errors import (
    AuthError,
    BusyError,
    DeadlineError,
    LengthConflictError,
    NotReadyError,
    ServerError,
    TooManyKeysError,
    TooManySequencesError,
)
from kernel.errors import IndexerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:nvfp4-indexer:problem:"
"""What the ``type`` of this project's problems starts with."""
_SHOWN_CHARS = 200
_PLAIN: Mapping[str, type[ServerError]] = {
    "unauthorized": AuthError,
    "forbidden-origin": AuthError,
    "too-many-sequences": TooManySequencesError,
    "too-many-keys": TooManyKeysError,
    "busy": BusyError,
    "crowded": BusyError,
    "warming": NotReadyError,
    "stopping": NotReadyError,
    "deadline": DeadlineError,
}


_REFUSALS: Mapping[int, type[ServerError]] = {429: BusyError, 503: NotReadyError}
"""What a proxy's status means when it comes with Retry-After: the request went no further."""


def error_of(status: int, headers: Mapping[str, str], body: bytes | bytearray) -> IndexerError:
    """The exception that an answer stands for.

    Args:
        status: HTTP status, not of success.
        headers: of the answer, their names in lower case or found in any.
        body: the whole body.
    """
    problem = _problem(headers.get("content-type", ""), body)
    if problem is None:
        text = " ".join(bytes(body[: 4 * _SHOWN_CHARS]).decode("utf-8", "replace").split())[:_SHOWN_CHARS]
        kind_of_error = _REFUSALS.get(status, ServerError) if "retry-after" in headers else ServerError
        return kind_of_error(status, "", f"not an answer of the sidecar: {text or 'no text'}")
    kind = _text(problem, "type").removeprefix(TYPE_PREFIX)
    detail, request_id = _text(problem, "detail"), _text(problem, "request_id")
    named = _named(kind, problem)
    if named is not None:
        named.__cause__ = ServerError(status, kind, detail, request_id)
        return named
    if kind == "length-conflict":
        return LengthConflictError(status, kind, detail, request_id, _integer(problem, "length"))
    return _PLAIN.get(kind, ServerError)(status, kind, detail, request_id)


def _named(kind: str, problem: Mapping[str, Any]) -> IndexerError | None:
    """The exception of a kind that an in-process scorer knows."""
    if kind == "unknown-sequence":
        return UnknownSequenceError(_text(problem, "value"))
    if kind == "out-of-pages":
        numbers = (_integer(problem, name) for name in ("needed_pages", "free_pages", "value"))
        return OutOfPagesError(*numbers)
    if kind == "invalid-argument":
        return InvalidArgumentError(
            *(_text(problem, name) for name in ("argument", "value", "limit", "remedy"))
        )
    if kind == "too-large":
        limit = f"the server takes {_text(problem, 'limit')} bytes"
        remedy = "send less at a time, or raise the server's limit"
        return InvalidArgumentError(_text(problem, "argument"), _text(problem, "value"), limit, remedy)
    return None


def _problem(content_type: str, body: bytes | bytearray) -> Mapping[str, Any] | None:
    if content_type.partition(";")[0].strip().lower() != MEDIA_TYPE:
        return None
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        return None
    known = isinstance(problem, dict) and str(problem.get("type", "")).startswith(TYPE_PREFIX)
    return problem if known else None


def _text(problem: Mapping[str, Any], name: str) -> str:
    return str(problem.get(name, ""))


def _integer(problem: Mapping[str, Any], name: str) -> int:
    value = problem.get(name)
    return value if type(value) is int else -1
