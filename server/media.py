"""Which form a body has, and which one the answer is to have."""

from __future__ import annotations

from typing import Final, Literal

from starlette.requests import Request

from server.problems import ProblemError

Form = Literal["application/octet-stream", "application/json"]
BINARY: Final = "application/octet-stream"
JSON: Final = "application/json"
_ANYTHING = frozenset({"", "*/*", "application/*"})


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
    accept = request.headers.get("accept", "")
    accepted = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    if BINARY in accepted:
        return BINARY
    if JSON in accepted:
        return JSON
    if accepted & _ANYTHING:
        return body
    raise ProblemError(
        406, "not-acceptable", f"accept {BINARY} or {JSON}", argument="Accept", value=accept[:200]
    )


def _unsupported(header: str, value: str, remedy: str) -> ProblemError:
    return ProblemError(
        415,
        "unsupported-media-type",
        f"{header} = {value[:100]!r}: not read here; {remedy}",
        argument=header,
        value=value[:200],
    )
