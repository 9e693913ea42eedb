"""``kernel first-run``: the parent, which runs each part as a process and packs what they find."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.first_run import DOCTOR, PARTS, SIMULATED, VERIFY
from client.first_run.run_part import command_of
from client.output import MISMATCH, JsonOption, one_line_errors, output, printable, status
from kernel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from client.first_run.record import Record
    from client.first_run.run_part import Interruption

PART_TIMEOUT_S = 1800.0


class Backend(str, enum.Enum):
    """The backends that launch the gfx950 kernels."""

    flydsl = "flydsl"
    simulated = SIMULATED


def first_run(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for what is found, made if missing.")],
    cases: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASE]...", help="Case files to verify beside the packaged one."),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="flydsl-sim tries the command itself, on small shapes.")
    ] = Backend.flydsl,
    part: Annotated[
        list[str] | None, typer.Option(metavar="PART", help=f"Only these: {', '.join(PARTS)}.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every gfx950 kernel against the oracle, time each, count with rocprofv3, pack what to send back.

    DIR must hold no earlier run. Each part is a process of its own: one that fails, hangs or ends does not
    stop the others. The exit code is 1 if one did, or if the backend cannot run here. A run that is stopped,
    by Ctrl-C, SIGTERM or SIGHUP, packs what it found; its exit code is 128 and the signal's number. With
    --json what is in DIR/first-run.json is printed.
    """
    from client.commands.doctor import versions
    from client.first_run.record import ARCHIVE, RECORD, TEXT, Record
    from client.first_run.run_part import Interruption

    interruption = Interruption()
    with one_line_errors(as_json):
        chosen = _chosen(part)
        _check_used(cases, chosen)
        _check_unused(out)
        record = Record(backend.value, versions(), kernels(), chosen)
        with _writing(out):  # before the work, to fail early
            out.mkdir(parents=True, exist_ok=True)
            record.write(out)
        record.stopped = _refusal(backend)
        with interruption.handling():
            _run(record, out, _cases(backend, cases or []), interruption)
            with _writing(out):
                record.pack(out)
    if as_json:
        print(json.dumps(record.fields()))
    else:
        console = output()
        text = "\n".join(map(printable, record.text().splitlines()))
        console.print(text, soft_wrap=True)
        wrote = ", ".join(str(out / name) for name in (ARCHIVE, RECORD, TEXT))
        console.print(f"wrote {printable(wrote)}", soft_wrap=True)
    if interruption.signal is not None:
        raise typer.Exit(128 + interruption.signal)
    if not record.ok:
        raise typer.Exit(MISMATCH)


def _run(record: Record, out: Path, cases: list[str], interruption: Interruption) -> None:
    from client.first_run.run_part import PartResult, run_part

    refused = record.stopped is not None
    with status() as on_step:
        # Where the backend cannot run, the doctor still says what the machine has.
        for number, name in enumerate([DOCTOR] if refused else record.planned, 1):
            if interruption.signal is not None:
                break
            on_step(f"{name}, {number} of {len(record.planned)}")
            if name == VERIFY and not cases:
                reason = "the packaged case is too large to be interpreted: name a small one"
                record.parts.append(PartResult(name, True, 0.0, None, [], skipped=reason))
            else:
                command = command_of(name, "auto" if refused else record.backend, out, cases)
                record.parts.append(run_part(name, command, PART_TIMEOUT_S, interruption))
            with _writing(out):
                record.write(out)
    if interruption.signal is not None:
        record.stopped = f"interrupted by {interruption.signal.name}"
    record.finished = record.stopped is None


def kernels() -> dict[str, str | None]:
    """Identifies the kernels: the digest of their sources, their library, if any, and the decode layout."""
    from kernel.backends.flydsl import geometry, kernel_library
    from kernel.backends.flydsl.kernel_library import sources_digest

    library = kernel_library.chosen()
    return {
        "sources": sources_digest(),
        "library": None if library is None else str(library),
        "decode_layout": os.environ.get(geometry.VARIABLE) or geometry.DEFAULT_LAYOUT,
    }


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Names ``--out`` when a write in the body fails."""
    try:
        yield
    except OSError as error:
        limit = f"cannot be written: {error.strerror or error}"
        raise InvalidArgumentError(
            "--out", out, limit, "make room, or name another folder with --out"
        ) from error


def _check_unused(out: Path) -> None:
    """Refuses the folder of an earlier run: its files would be packed as this run's."""
    from client.first_run.record import OWN_NAMES

    found = [name for name in OWN_NAMES if os.path.lexists(out / name)]
    if found:
        raise InvalidArgumentError(
            "--out", out, f"holds {', '.join(found)} of an earlier run", "name another folder: --out NEW"
        )


def _refusal(backend: Backend) -> str | None:
    """Returns why the backend cannot run here, None if it can."""
    from kernel.backends import registry
    from kernel.errors import BackendUnavailableError

    try:
        registry.resolve(backend.value)
    except BackendUnavailableError as error:
        return str(error)
    return None


def _chosen(parts: list[str] | None) -> list[str]:
    unknown = sorted(set(parts or ()) - set(PARTS))
    if unknown:
        raise InvalidArgumentError(
            "--part", ", ".join(unknown), f"must be one of {', '.join(PARTS)}", "choose one of them"
        )
    return [name for name in PARTS if not parts or name in parts]


def _check_used(cases: list[str] | None, parts: list[str]) -> None:
    """Refuses case files that no chosen part reads."""
    if cases and VERIFY not in parts:
        limit = f"is read by the part {VERIFY}, which --part leaves out"
        raise InvalidArgumentError("CASE", cases[0], limit, f"add --part {VERIFY}, or leave the case out")


def _cases(backend: Backend, named: list[str]) -> list[str]:
    from client.commands.demo import demo_case

    return named if backend is Backend.simulated else [str(demo_case()), *named]
