"""Where text for people goes: results to stdout, progress to stderr, and that only on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

PIPE_WIDTH = 110
"""Columns of text that does not go to a terminal."""
LEAST_WIDTH = 80
"""Columns that every table fits: a narrower terminal wraps its lines, which loses no digit."""


class _Results(Console):
    def on_broken_pipe(self) -> None:
        raise  # of the handler it is called in: rich itself would exit with 1, which says a wrong result


def output(pipe_width: int = PIPE_WIDTH) -> Console:
    """The console of results."""
    console = _Results(highlight=False)
    if not console.is_terminal:
        console.width = pipe_width
    elif console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    return console


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things: ``1 head``, ``2 heads``; ``many`` where an s does not do."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def progress() -> Progress:
    """Progress over things that are counted; nothing is drawn where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A spinner that says what is going on; nothing is drawn where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as spinner:
        yield lambda step: spinner.update(step)
