"""Which form a body has, and which one the answer is to have."""

from __future__ import annotations

import re
from typing import Final, Literal

from starlette.requests import Request

from server.problems import ProblemError

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
