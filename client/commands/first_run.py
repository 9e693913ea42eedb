"""``kernel first-run``: everything that is to be known of the kernels on their first GPU, in one archive."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from client.failure import MISMATCH, one_line_errors, printable
from client.first_run.parts import PARTS, SIMULATED, VERIFY, command_of
from client.options import JsonOption

PART_TIMEOUT_S = 1800


class Where(str, enum.Enum):
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
        Where, typer.Option(help="flydsl-sim tries the command itself, on small shapes.")
    ] = Where.flydsl,
    part: Annotated[
        list[str] | None, typer.Option(metavar="PART", help=f"Only these: {', '.join(PARTS)}.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every gfx950 kernel against the oracle, time each, count with rocprofv3, pack what to send back.

    Each part is a process of its own: one that fails, hangs or ends does not stop the others. The exit code
    is 1 if one did. With --json what is in DIR/first-run.json is printed.
    """
    from client.commands.doctor import versions
    from client.first_run.record import ARCHIVE, RECORD, TEXT, Record
    from client.first_run.run_part import PartResult, run_part
    from client.terminal import output, status
    from kernel.backends import registry

    with one_line_errors(as_json), status() as on_step:
        chosen = _chosen(part)
        registry.resolve(backend.value)
        out.mkdir(parents=True, exist_ok=True)
        named = _cases(backend, cases or [])
        done: list[PartResult] = []
        record = Record(backend.value, versions(), kernels(), done)
        record.write(out)  # a folder that cannot be written is told before the work
        for number, name in enumerate(chosen, 1):
            on_step(f"{name}, {number} of {len(chosen)}")
            if name == VERIFY and not named:
                reason = "the packaged case is too large to be interpreted: name a small one"
                done.append(PartResult(name, True, 0.0, None, [], skipped=reason))
            else:
                command = command_of(name, backend.value, out, named)
                done.append(run_part(name, command, PART_TIMEOUT_S))
            record.write(out)
        record.pack(out)
    if as_json:
        print(json.dumps(record.fields()))
    else:
        console = output()
        console.print(printable_lines(record.text()), markup=False, soft_wrap=True)
        wrote = ", ".join(str(out / name) for name in (ARCHIVE, RECORD, TEXT))
        console.print(f"wrote {printable(wrote)}", markup=False, soft_wrap=True)
    if not record.ok:
        raise typer.Exit(MISMATCH)


def kernels() -> dict[str, str | None]:
    """Which kernels run: the digest of their sources, the library that holds them, if any, and the layout."""
    from kernel.backends.flydsl import decode_layout, kernel_library
    from kernel.backends.flydsl.library_manifest import sources_digest

    library = kernel_library.chosen()
    return {
        "sources": sources_digest(),
        "library": None if library is None else str(library),
        "decode_layout": decode_layout.chosen(),
    }


def printable_lines(text: str) -> str:
    """A text without anything that steers a terminal but the ends of its lines."""
    return "\n".join(map(printable, text.splitlines()))


def _chosen(parts: list[str] | None) -> list[str]:
    from kernel.errors import InvalidArgumentError

    unknown = sorted(set(parts or ()) - set(PARTS))
    if unknown:
        raise InvalidArgumentError(
            "--part", ", ".join(unknown), f"must be one of {', '.join(PARTS)}", "choose one of them"
        )
    return [name for name in PARTS if not parts or name in parts]


def _cases(backend: Where, named: list[str]) -> list[str]:
    from client.demo_case import demo_case

    return named if backend is Where.simulated else [str(demo_case()), *named]
