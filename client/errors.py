"""Errors of a client beside those of an in-process scorer, and the error that each answer stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from indexer.wire import PROBLEM, PROBLEM_PREFIX
from kernel.errors import IndexerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError


class ServerError(IndexerError):
    """The server answered with an error that has no counterpart in process.

    Args:
        status: HTTP status.
        kind: the problem's kind, such as ``internal``; empty if the answer was not a problem document.
        detail: what happened, and the remedy.
        request_id: under which the server's log has it; empty if unknown.
    """

    def __init__(self, status: int, kind: str, detail: str, request_id: str = "") -> None:
        where = f"HTTP {status}, request {request_id}" if request_id else f"HTTP {status}"
        super().__init__(f"{detail} ({where})")
        self.status = status
        self.kind = kind
        self.detail = detail
        self.request_id = request_id


class BusyError(ServerError):
    """The server, or a proxy before it, stayed busy for as long as the client waits. Nothing was done."""


class NotReadyError(ServerError):
    """The server warms up or shuts down, or a proxy has no server. Nothing was done."""


class DeadlineError(ServerError):
    """The server's deadline passed before the call began. Nothing was done."""


class AuthError(ServerError):
    """The token is missing or wrong, or the server serves only its own machine."""


class TooManySequencesError(ServerError):
    """The server, or this token, has as many live sequences as it may. Nothing was done."""


class TooManyKeysError(ServerError):
    """This token's sequences would hold more keys than they may. Nothing was done."""


class LengthConflictError(ServerError):
    """A sequence does not hold the ``start`` tokens that an append was for. Nothing was appended.

    Attributes:
        length: tokens that it holds.
    """

    def __init__(self, status: int, kind: str, detail: str, request_id: str, length: int) -> None:
        super().__init__(status, kind, detail, request_id)
        self.length = length


class BadReplyError(IndexerError):
    """The answer is not what this client asked for: another server, or one of another version."""


class ServerConnectionError(IndexerError, ConnectionError):
    """No answer: the server cannot be reached, or the connection broke."""


class ServerTimeoutError(ServerConnectionError, TimeoutError):
    """No answer in time."""


# ---- Error answers ----

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
    """Returns the exception that an answer stands for.

    Args:
        status: HTTP status, not of success.
        headers: of the answer; names in lower case, or a case-insensitive mapping.
        body: the whole body.
    """
    problem = _problem(headers.get("content-type", ""), body)
    if problem is None:
        text = " ".join(bytes(body[: 4 * _SHOWN_CHARS]).decode("utf-8", "replace").split())[:_SHOWN_CHARS]
        kind_of_error = _REFUSALS.get(status, ServerError) if "retry-after" in headers else ServerError
        return kind_of_error(status, "", f"not an answer of the sidecar: {text or 'no text'}")
    kind = _text(problem, "type").removeprefix(PROBLEM_PREFIX)
    detail, request_id = _text(problem, "detail"), _text(problem, "request_id")
    named = _named(kind, problem)
    if named is not None:
        named.__cause__ = ServerError(status, kind, detail, request_id)
        return named
    if kind == "length-conflict":
        return LengthConflictError(status, kind, detail, request_id, _integer(problem, "length"))
    return _PLAIN.get(kind, ServerError)(status, kind, detail, request_id)


def _named(kind: str, problem: Mapping[str, Any]) -> IndexerError | None:
    """Returns the exception of a kind that an in-process scorer raises, too."""
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
    if content_type.partition(";")[0].strip().lower() != PROBLEM:
        return None
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        return None
    known = isinstance(problem, dict) and str(problem.get("type", "")).startswith(PROBLEM_PREFIX)
    return problem if known else None


def _text(problem: Mapping[str, Any], name: str) -> str:
    return str(problem.get(name, ""))


def _integer(problem: Mapping[str, Any], name: str) -> int:
    value = problem.get(name)
    return value if type(value) is int else -1
