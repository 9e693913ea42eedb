"""A call to the server as a value: what is sent, what the answer means, and whether it may be sent twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from indexer.case.container import Buffer
from kernel.errors import IndexerError

T = TypeVar("T")

BINARY = "application/octet-stream"
JSON = "application/json"
_CHUNK_BYTES = 1 << 20


def _raise(error: IndexerError) -> NoReturn:
    raise error


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """One request and the meaning of its answer.

    Attributes:
        method: HTTP method.
        path: path below the server's URL.
        parse: makes the result of a successful answer's body.
        query: query parameters.
        body: buffers of a binary body, sent one after another; empty: no body.
        accept: media type of the answer.
        repeatable: whether it may be sent again when its answer was lost, so that it may have been executed.
        after_lost: what an error means when an earlier answer was lost: the result, or the error is raised.
    """

    method: str
    path: str
    parse: Callable[[bytearray], T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    accept: str = JSON
    repeatable: bool = False
    after_lost: Callable[[IndexerError], T] = _raise

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request."""
        headers = {"Accept": self.accept}
        if self.body:
            headers["Content-Type"] = BINARY
            headers["Content-Length"] = str(sum(len(buffer) for buffer in self.body))
        return headers

    def chunks(self) -> Iterator[bytes]:
        """The body in parts of at most 1 MiB, so that a large tensor is never copied as a whole."""
        for buffer in self.body:
            view = memoryview(buffer)
            for start in range(0, len(view), _CHUNK_BYTES):
                yield bytes(view[start : start + _CHUNK_BYTES])


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytearray
