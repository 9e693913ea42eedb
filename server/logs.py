"""Structured logs on stderr that neither stop the server nor steer a terminal.

A line is written as far as the descriptor takes it at once. A full disk, a reader that is gone or that does
not read, and a stopped terminal cost lines and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer

_MAX_CHARS = 500
"""Of a field; paths and methods come from clients."""
_MAX_TRACEBACK_CHARS = 20_000
_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure_logs(level: str, form: str) -> None:
    """Sets up structured logs on stderr, the web server's own included.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        form: ``json``, one object a line, or ``console``.
    """
    number: int = getattr(logging, level.upper())
    renderer: list[Any]
    if form == "json":
        frames = ExceptionDictTransformer(show_locals=False)  # locals hold tensors, and what clients sent
        renderer = [
            structlog.processors.ExceptionRenderer(frames),
            _shown,
            structlog.processors.JSONRenderer(),
        ]
    else:
        renderer = [
            structlog.processors.format_exc_info,
            _shown,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr is not None and sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    stream: Any = LogStream(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY))
    structlog.configure(
        processors=[*_SHARED, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
            foreign_pre_chain=_SHARED,
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))


class LogStream:
    """Writes to a descriptor what it takes at once, and drops the rest.

    Args:
        descriptor: open for writing; others may share it, so it stays as it is, blocking.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._lock = threading.Lock()
        self._dropped = 0
        self._is_cut = False

    def write(self, text: str) -> None:
        """Writes lines. Once some are written again, the number of those that were not is written before."""
        with self._lock:
            if self._dropped:
                note = {"count": self._dropped, "event": "lines dropped", "level": "warning"}
                if self._written(json.dumps(note) + "\n"):
                    self._dropped = 0
            if self._dropped or not self._written(text):
                self._dropped += 1

    def flush(self) -> None:
        """Nothing is kept back."""

    def _written(self, text: str) -> bool:
        rest = text.encode("utf-8", "backslashreplace")
        if self._is_cut:
            rest = b"\n" + rest
        # A pipe that is ready takes PIPE_BUF bytes without waiting.
        while rest and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            try:
                count = os.write(self._descriptor, rest[: select.PIPE_BUF])
            except OSError:
                break
            self._is_cut = not rest[:count].endswith(b"\n")
            rest = rest[count:]
        return not rest


def _shown(_: object, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Escapes what a terminal would obey and bounds every field."""
    for name, value in event.items():
        if isinstance(value, str):
            if name == "exception":
                event[name] = _escaped(value[-_MAX_TRACEBACK_CHARS:], "\n")
            else:
                event[name] = _escaped(value[:_MAX_CHARS], "")
    return event


def _escaped(text: str, kept: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
