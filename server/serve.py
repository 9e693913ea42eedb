"""The sidecar's process: settings, logs, socket, web server, exit code."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

import structlog
import uvicorn
from pydantic import ValidationError

from kernel.backends import registry
from kernel.errors import IndexerError
from server.app import create_app, new_state
from server.http import FURTHER_CONNECTIONS, protocol_of
from server.logs import configure_logs
from server.settings import Settings

_SWITCH_SECONDS = 0.0005
"""Longest time that a thread keeps the GIL while another waits for it. The device's thread releases it for
every tensor operation; with Python's 5 ms it would wait that long each time a request is parsed."""
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 256
"""Connections that wait to be accepted; asyncio accepts so many in a row before it looks at the first."""
_OTHER_FILES = 96
"""Open files besides connections: libraries, devices, a profile's trace."""

_log = structlog.get_logger("server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT.

    Args:
        arguments: flags; the process's own when None.

    Returns:
        The exit code: 0 after draining; 2 for settings that cannot be used; 1 for an address in use, a URL
        file that cannot be written, a backend that fails its self-test or a device without room for the
        pages. A call that still runs after ``drain_seconds`` ends the process with 1, without returning.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        settings = Settings(_cli_parse_args=given)  # type: ignore[call-arg]
        registry.resolve(settings.backend)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            print(f"{name}: {problem['msg']}" if name else problem["msg"], file=sys.stderr)
        return 2
    except (IndexerError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    configure_logs(settings.log_level, settings.log_format)
    settings, further, backlog = _within_open_files(settings)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        listener = _bound(settings)
    except OSError as error:
        print(f"host = {settings.host}, port = {settings.port}: {error.strerror}", file=sys.stderr)
        return 1
    host, port = listener.getsockname()[:2]
    if settings.url_file is not None:
        try:
            settings.url_file.write_text(f"{_url(host, port)}\n", encoding="utf-8")
        except OSError as error:
            listener.close()
            print(f"url_file = {settings.url_file}: {error.strerror}; name another file", file=sys.stderr)
            return 1
    _log.info("listening", host=host, port=port, tokens=len(settings.all_tokens()))
    state = new_state(settings)
    config = uvicorn.Config(
        create_app(state),
        http=protocol_of(settings.deadline_seconds, settings.max_connections, further),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=backlog,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.drain_seconds,
        lifespan="on",
        ws="none",
    )
    # uvicorn raises the signal again once it has drained: the exit code must stay 0. SIGHUP is served later.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    state.end = end
    server.run(sockets=[listener])
    if state.engine is not None:
        state.engine.close()
    if state.worker.running:
        _leave()
    return 1 if state.failed else 0


def _within_open_files(settings: Settings) -> tuple[Settings, int, int]:
    """Makes room for every connection in the process's open files: accept must never fail for want of one.

    Returns:
        The settings, with fewer connections where the system allows no more files; connections beyond
        the limit that are told so; and connections that may wait.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + FURTHER_CONNECTIONS + _BACKLOG + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return settings, FURTHER_CONNECTIONS, _BACKLOG
    files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    share = max(1, (files - _OTHER_FILES) // 4)
    further, backlog = min(FURTHER_CONNECTIONS, share), min(_BACKLOG, share)
    room = max(1, files - _OTHER_FILES - further - backlog)
    if room < settings.max_connections:
        asked = settings.max_connections
        _log.warning("fewer connections", open_files=files, max_connections=room, asked=asked)
        settings = settings.model_copy(update={"max_connections": room})
    return settings, further, backlog


def _leave() -> NoReturn:
    """Ends the process while the device's thread is inside a call: the interpreter would abort it."""
    _log.error("left a running call", remedy="raise drain_seconds above the longest call")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _url(host: str, port: int) -> str:
    """Returns the URL at which this machine reaches a bound address."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound here
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _bound(settings: Settings) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Before the log line: whoever reads that may connect, and waits until the event loop runs.
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
