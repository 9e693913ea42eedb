"""The command's entry point."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from client.command_line import NAME, CommandLine
from client.commands.bench import bench
from client.commands.case import case
from client.commands.demo import demo
from client.commands.doctor import doctor
from client.commands.fidelity import fidelity
from client.commands.kernel import kernel
from client.commands.profile import profile
from client.commands.report import report
from client.commands.score import score
from client.commands.serve import PASSED_ON, serve
from client.commands.verify import verify

EXIT_CODES = """
Exit codes: 0 all is right; 1 a result is wrong; 2 bad usage, a bad file, a backend that cannot run here, or a
sidecar that does not answer.
An error is one line on stderr: with --json a JSON object with error, message, and argument, value, limit and
remedy where they apply. stdout holds results only.
If stdout cannot be written the exit code is 2, or quietly 141 if its reader has gone; after Ctrl-C it is 130.
"""

app = typer.Typer(
    cls=CommandLine,
    name=NAME,
    help="The sparse-attention block indexer of MiniMax-M3: score blocks of NVFP4 keys, select the best.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
for command in (demo, doctor, score, verify, fidelity, profile, report, bench):
    app.command(epilog=EXIT_CODES)(command)
app.command(add_help_option=False, context_settings=PASSED_ON)(serve)
app.add_typer(kernel)
app.add_typer(case)


def _print_version(asked: bool) -> None:
    if not asked:
        return
    try:
        print(f"{NAME} {metadata.version(NAME)}")
    except metadata.PackageNotFoundError:
        print("nvfp4-indexer, not installed: run from its sources")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
