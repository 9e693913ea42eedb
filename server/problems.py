"""Error answers: every kind of problem, and what each error of the scorer becomes (RFC 9457)."""

from __future__ import annotations

import json
from typing import Any

import torch
from starlette.responses import Response

from indexer.wire import PROBLEM, PROBLEM_PREFIX
from kernel.errors import (
    IndexerError,
    InvalidArgumentError,
    OutOfPagesError,
    RankLostError,
    UnknownSequenceError,
)

TITLES = {
    "invalid-argument": "An argument is outside the contract",
    "malformed": "The request is not HTTP",
    "unauthorized": "A bearer token is needed",
    "forbidden-origin": "The request comes from another site",
    "not-found": "No such resource",
    "unknown-sequence": "No such sequence",
    "method-not-allowed": "The resource has no such method",
    "not-acceptable": "No representation that the request accepts",
    "out-of-pages": "The cache has too few free pages",
    "length-conflict": "The sequence has another length",
    "too-many-sequences": "No more sequences can be made",
    "too-many-keys": "No more keys can be appended",
    "out-of-memory": "The server has too little memory",
    "too-large": "The body is too large",
    "unsupported-media-type": "The body has a type that is not read",
    "busy": "Every place in the queue is taken",
    "crowded": "The server has too many connections",
    "warming": "The backend is not ready",
    "stopping": "The server is being shut down",
    "rank-lost": "A rank of the scorer ended",
    "deadline": "The deadline passed",
    "disconnected": "The client went away",
    "internal": "The server failed",
}
"""Title of each kind of problem."""
_SHOWN_CHARS = 200


class ProblemError(Exception):
    """Answers a request with an error.

    Args:
        status: HTTP status.
        kind: a key of :data:`TITLES`.
        detail: what happened, and the remedy.
        headers: further response headers.
        members: further members of the body, such as ``argument``.
    """

    def __init__(
        self, status: int, kind: str, detail: str, headers: dict[str, str] | None = None, **members: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = headers or {}
        self.members = members

    def response(self, request_id: str) -> Response:
        """Returns the answer, with the request's id."""
        content = {
            "type": PROBLEM_PREFIX + self.kind,
            "title": TITLES[self.kind],
            "status": self.status,
            "detail": self.detail,
            "request_id": request_id,
            **self.members,
        }
        return Response(json.dumps(content, ensure_ascii=True), self.status, self.headers, media_type=PROBLEM)


def invalid(argument: str, value: object, limit: str, remedy: str) -> ProblemError:
    """Returns the 422 that names an argument."""
    return of_error(InvalidArgumentError(argument, value, limit, remedy))


def of_error(error: IndexerError) -> ProblemError:
    """Returns the problem that an error of the scorer becomes."""
    if isinstance(error, UnknownSequenceError):
        value = _shown(error.sequence)
        return ProblemError(
            404,
            "unknown-sequence",
            f"id = {value}: not a live sequence of this token; ids come from POST /v1/sequences and a fork, "
            "and end with a DELETE, a restart of the server, or after sequence_ttl_seconds without a call",
            argument="id",
            value=value,
        )
    if isinstance(error, OutOfPagesError):
        return ProblemError(
            409,
            "out-of-pages",
            str(error),
            argument="num_pages",
            value=error.num_pages,
            needed_pages=error.needed,
            free_pages=error.free,
            missing_pages=error.missing,
        )
    if isinstance(error, InvalidArgumentError):
        return ProblemError(
            422,
            "invalid-argument",
            str(error),
            argument=error.argument,
            value=_shown(error.value),
            limit=error.limit,
            remedy=error.remedy,
        )
    if isinstance(error, RankLostError):
        return ProblemError(503, "rank-lost", f"{error}; nothing was done", ranks=list(error.ranks))
    return of_failure(error)


def of_failure(error: Exception) -> ProblemError:
    """Returns the problem of what was not foreseen; its cause is in the log under the request's id."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return ProblemError(
            503,
            "out-of-memory",
            "the server has not the memory that this call needs; nothing was done. Ask for less at a time; "
            "scores=false needs least",
        )
    return ProblemError(500, "internal", "the server failed on this request; its log has the cause")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
