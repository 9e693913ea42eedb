"""What can go wrong between a client and a server, beside the errors that an in-process scorer raises too."""

from __future__ import annotations

from kernel.errors import IndexerError


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
    """The server, or a proxy before it, had no place for as long as the client may wait. Nothing was done."""


class NotReadyError(ServerError):
    """The server warms up or is being shut down, or a proxy has no server. Nothing was done."""


class DeadlineError(ServerError):
    """The server's deadline passed before the call began. Nothing was done."""


class AuthError(ServerError):
    """The token is missing or wrong, or the server serves its own machine only."""


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
