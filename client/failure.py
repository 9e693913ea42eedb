"""Errors at a terminal: one line that names the fault, no traceback, exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator

import typer

from kernel.errors import IndexerError

MISMATCH = 1
"""Exit code of a wrong result."""
FAILURE = 2
"""Exit code of bad usage, a bad file, or a backend that cannot run here."""

_NO_MEMORY = (
    "Cannot allocate memory",
    "allocate memory: you tried",
    "failed to map segment",
    "can't start new thread",
    "out of memory",
)
"""What torch, the dynamic loader and the threads say in place of a MemoryError."""


@contextlib.contextmanager
def one_line_errors(as_json: bool, case: str | None = None) -> Iterator[None]:
    """End the command with exit code 2 and one line when an expected error leaves the body."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (IndexerError, OSError)) and not out_of_memory(error):
            raise
        report(error, as_json, case)
        raise typer.Exit(FAILURE) from error


def report(error: Exception, as_json: bool, case: str | None = None) -> None:
    """Print an error as one line on stderr, naming the case it happened in."""
    message = printable(_message(error))
    is_option = str(getattr(error, "argument", "")).startswith("--")  # the case is not at fault
    if case is not None and not is_option and printable(case) not in message:
        message = f"{printable(case)}: {message}"
    if not as_json:
        print(f"error: {message}", file=sys.stderr)
        return
    fields = {"error": type(error).__name__, "message": message}
    if case is not None:
        fields["case"] = case
    for name in ("argument", "value", "limit", "remedy", "backend", "reason"):
        if hasattr(error, name):
            fields[name] = str(getattr(error, name))
    print(json.dumps(fields), file=sys.stderr)


def printable(text: str) -> str:
    """A text as one line without anything that steers a terminal: file names may hold any byte."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def out_of_memory(error: Exception) -> bool:
    """Whether an error, of whatever kind its library raises, says that memory ran out."""
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY)


def _message(error: Exception) -> str:
    if out_of_memory(error):
        reason = next(iter(str(error).splitlines()), "") or "none is left"
        return f"out of memory: {reason}; free some, raise the limit (ulimit -v), or use a smaller case"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, (IndexerError, OSError)):
        return str(error)
    return f"a defect of this program, please report it: {type(error).__name__}: {error}"
