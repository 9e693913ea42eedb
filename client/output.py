"""What commands share: options, errors of one line, output at a terminal, tables, JSON, files, pictures.

Results go to stdout. Progress goes to stderr, and only where that is a terminal.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from indexer.case.codec import write_atomically
from indexer.case.container import Buffer
from kernel.errors import IndexerError, InvalidArgumentError

MISMATCH = 1
"""Exit code of a wrong result."""
FAILURE = 2
"""Exit code of bad usage, a bad file, a backend that cannot run here, or a sidecar that does not answer."""
PIPE_WIDTH = 110
"""Columns of output that does not go to a terminal."""
LEAST_WIDTH = 80
"""Columns that every table fits: a narrower terminal wraps its lines, which loses no digit."""
_LEAST_CELL = 16
"""Characters of a text that are not folded, however narrow its table."""
_AIRY_COLUMNS = 4
"""Columns of a table beyond which they stand closer together."""
_MOST_COLUMNS = 1 << 16
"""Columns that hold any row of a table."""
_NO_MEMORY = (
    "Cannot allocate memory",
    "allocate memory: you tried",
    "failed to map segment",
    "can't start new thread",
    "out of memory",
)
"""Messages of torch, the dynamic loader and threads where Python would raise a MemoryError."""


# ---- Options ----


class Precision(str, enum.Enum):
    """Score error allowed: 2^-16 or 2^-9 of the sum of |q_i k_i|."""

    exact = "exact"
    fast = "fast"


class Order(str, enum.Enum):
    """Order of a row's block ids."""

    score = "score"
    block = "block"


BackendOption = Annotated[
    str, typer.Option(help="A backend's name (see doctor), or auto for the best usable one.")
]
CaseArgument = Annotated[str, typer.Argument(metavar="CASE", help="A case file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of human-readable text.")]
PrecisionOption = Annotated[Precision, typer.Option(help="Score error allowed: 2^-16 or 2^-9 of sum|q k|.")]
UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Root of a sidecar that does the work, instead of this machine."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        envvar="NVFP4_INDEXER_TOKEN",
        show_envvar=True,
        help="The sidecar's token; better in the environment, where other users do not see it.",
    ),
]


# ---- Errors: one line on stderr that names the fault, exit code 2 ----


@contextlib.contextmanager
def one_line_errors(as_json: bool, case: str | None = None) -> Iterator[None]:
    """Ends the command with exit code 2 and one line when an expected error leaves the body."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (IndexerError, OSError)) and not out_of_memory(error):
            raise
        report_failure(error, as_json, case)
        raise typer.Exit(FAILURE) from error


def report_failure(error: Exception, as_json: bool, case: str | None = None) -> None:
    """Prints an error as one line on stderr, naming the case it happened in."""
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
    for name in ("argument", "value", "limit", "remedy", "backend", "reason", "status", "kind", "request_id"):
        if hasattr(error, name):
            fields[name] = str(getattr(error, name))
    print(json.dumps(fields), file=sys.stderr)


def out_of_memory(error: Exception) -> bool:
    """Whether an error, of whatever type, says that memory ran out."""
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


# ---- Terminal ----


class _Results(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print text as it is, and tables whole: a terminal that is too narrow wraps their lines."""
        super().print(*objects, **{"crop": False, **options})

    def on_broken_pipe(self) -> None:
        raise  # the handler's exception: rich itself would exit with 1, the code of a wrong result


def output(pipe_width: int = PIPE_WIDTH) -> Console:
    """Returns the console for results."""
    console = _Results(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = pipe_width
    elif console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    return console


def progress() -> Progress:
    """Returns a progress bar; nothing is drawn where stderr is no terminal."""
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
    """Shows a spinner with the current step; nothing is drawn where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as spinner:
        yield lambda step: spinner.update(step)


def printable(text: str) -> str:
    """Returns a text as one line without control characters: file names may hold any byte."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def counted(number: int, one: str, many: str = "") -> str:
    """Returns a count with its noun: ``1 head``, ``2 heads``; ``many`` is an irregular plural."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


# ---- Tables ----


@dataclass(frozen=True)
class Cells:
    """The contents of a table, for a terminal or an HTML page.

    Attributes:
        columns: headings.
        rows: a cell for each column; the last ones may be missing.
        words: columns of text, left-aligned; the others hold numbers, right-aligned.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    words: Collection[int] = (0,)

    def table(self, title: str | None = None) -> Table:
        """Returns the table for a terminal: where it is too wide, headings and text wrap, figures do not."""
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        if len(self.columns) > _AIRY_COLUMNS:
            table.pad_edge, table.padding = False, (0, 1, 0, 0)
        for i, name in enumerate(self.columns):
            widest = max((len(row[i]) for row in self.rows if i < len(row)), default=0)
            justify: JustifyMethod = "left" if i in self.words else "right"
            width = max(min(widest, _LEAST_CELL), *map(len, name.split()), 0)
            short = i in self.words and widest <= width
            table.add_column(name, justify=justify, overflow="fold", no_wrap=short, min_width=width)
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table


def fits(console: Console, table: Table, *, indent: int = 0) -> bool:
    """Whether a table fits a console, on lines indented by some columns, without a cell that wraps."""
    wanted = console.measure(table, options=console.options.update(max_width=_MOST_COLUMNS))
    return wanted.maximum + indent <= console.width


# ---- JSON, which has no NaN and no infinity ----


def dumps(value: object) -> str:
    """Returns one line of JSON; a number that is not finite becomes ``"nan"``, ``"inf"`` or ``"-inf"``."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(held) for held in value]
    return value


# ---- Files that an option names: checked before the work, written whole ----


def check_output(option: str, path: Path, *cases: str) -> None:
    """Refuses a file that cannot be written, before anything is computed. Changes nothing.

    Args:
        option: the option that names the file, for messages.
        path: the file.
        cases: case files that are read and must not be overwritten.

    Raises:
        InvalidArgumentError: the path is a folder or a case itself, or cannot be written.
    """
    try:
        found: os.stat_result | None = path.stat()
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise _refusal(option, path, error) from error
    if found is None:
        target = Path(os.path.realpath(path))
        _check_folder(option, path, next(folder for folder in target.parents if os.path.lexists(folder)))
        return
    if stat.S_ISDIR(found.st_mode):
        raise InvalidArgumentError(option, path, "is a folder", f"name a file with {option}")
    if any(os.path.samestat(found, Path(case).stat()) for case in cases):
        raise InvalidArgumentError(option, path, "is the case itself", f"name another file with {option}")
    if stat.S_ISREG(found.st_mode):
        _check_folder(option, path, Path(os.path.realpath(path)).parent)
    elif not (stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode)):
        limit = "must be a regular file, a FIFO or a character device"
        raise InvalidArgumentError(option, path, limit, f"name another file with {option}")


def write_output(option: str, path: Path, buffers: Iterable[Buffer]) -> None:
    """Writes a file, whole or not at all, and the folders that it needs.

    Raises:
        InvalidArgumentError: naming the option, the path and the reason; an older file is left as it was.
    """
    try:
        if not path.exists():
            Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(buffers, path)
    except OSError as error:
        raise _refusal(option, path, error) from error


def _check_folder(option: str, path: Path, folder: Path) -> None:
    if not folder.is_dir():
        limit = f"cannot be written: {folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        limit = f"cannot be written: no permission to write in {folder}"
    else:
        return
    raise InvalidArgumentError(option, path, limit, f"name another file with {option}")


def _refusal(option: str, path: Path, error: OSError) -> InvalidArgumentError:
    limit = f"cannot be written: {error.strerror or error}"
    return InvalidArgumentError(option, path, limit, f"name another file with {option}")


# ---- Pictures ----


def check_picture(picture: Path, *cases: str) -> None:
    """Refuses a picture of another format than PNG and SVG, or one that :func:`check_output` refuses.

    Raises:
        InvalidArgumentError: naming the option, the path and the reason.
    """
    check_output("--picture", picture, *cases)
    if picture.suffix.lower() not in (".png", ".svg"):
        limit = f"is drawn as PNG or SVG, not {picture.suffix or 'a file without suffix'}"
        raise InvalidArgumentError("--picture", picture, limit, "end its name in .png or .svg")


@contextlib.contextmanager
def importing_plots(picture: Path) -> Iterator[None]:
    """Turns a missing matplotlib, which is an extra, into an error that names it.

    Raises:
        InvalidArgumentError: a package that the body imports is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = "pip install 'nvfp4-indexer[plot]'"
        raise InvalidArgumentError("--picture", picture, f"{error.name} is missing", remedy) from error
