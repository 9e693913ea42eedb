"""The least HTTP client that measures a server and not itself: one connection, requests built beforehand."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from indexer.case.container import Buffer


def request_bytes(method: str, path: str, buffers: list[Buffer], media_type: str) -> bytes:
    """A whole HTTP/1.1 request."""
    body = b"".join(buffers)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {media_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One kept-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to a server."""
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24))

    async def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Send a request; its status, head and body."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        body = await self._reader.readexactly(length) if length else b""
        return int(head[9:12]), head, body

    def send(self, part: bytes) -> None:
        """Send a part of a request."""
        self._writer.write(part)

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
