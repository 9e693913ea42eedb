"""The ``nvfp4-indexer`` command: its subcommands, and every way to end as an exit code and at most one line.

Imports stay light, so that --help is quick: no torch, no HTTP client.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from typer import Exit
from typer.core import TyperGroup

from client.commands.bench import bench
from client.commands.case import case
from client.commands.demo import demo
from client.commands.doctor import doctor
from client.commands.fidelity import fidelity
from client.commands.kernel import kernel
from client.commands.profile import profile
from client.commands.report import report
from client.commands.score import score
from client.commands.verify import verify
from client.output import FAILURE, out_of_memory, printable, report_failure

NAME = "nvfp4-indexer"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
READER_GONE = 141
"""Exit code after the reader of stdout has gone: 128 + SIGPIPE."""
PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of ``serve``: its options are the server's settings, which are declared there only."""


class CommandLine(TyperGroup):
    """The group of commands; it exits as :data:`EXIT_CODES` says."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit; without ``standalone_mode`` as typer does."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in itertools.takewhile(lambda word: word != "--", words)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # text of a case may not fit the locale
        try:
            code = self._run(words, as_json)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:  # of stdout or stderr: commands name the option or case of another file
            code = READER_GONE
            if not isinstance(error, BrokenPipeError):
                code = FAILURE
                with contextlib.suppress(OSError):
                    report_failure(OSError(error.errno, error.strerror, error.filename or "stdout"), as_json)
            _drop_stdout()
        sys.exit(code)

    def _run(self, words: list[str], as_json: bool) -> int:
        try:
            with self.make_context(self.name, words) as context:
                self.invoke(context)
        except Exit as end:
            return end.exit_code
        except KeyboardInterrupt:
            return INTERRUPTED
        except OSError as error:
            if not out_of_memory(error):
                raise
            report_failure(error, as_json)
        except Exception as error:
            if hasattr(error, "format_message"):  # typer's own, or click's, by the release of typer
                _report_usage(error, as_json)
            else:
                if not out_of_memory(error):
                    traceback.print_exc()
                report_failure(error, as_json)
        else:
            return 0
        return FAILURE


def _report_usage(error: Any, as_json: bool) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    message = printable(" ".join(error.format_message().split()))
    context = getattr(error, "ctx", None)
    remedy = f"see {context.command_path if context is not None else NAME} --help"
    if not as_json:
        print(f"error: {message.rstrip('.')}; {remedy}", file=sys.stderr)
        return
    fields = {"error": type(error).__name__, "message": message}
    parameter = getattr(error, "param", None)
    argument = getattr(error, "option_name", None) or (
        parameter and (parameter.metavar or parameter.opts[-1])
    )
    if argument:
        fields["argument"] = argument
    print(json.dumps({**fields, "remedy": remedy}), file=sys.stderr)


def _drop_stdout() -> None:
    """Discards what is left in stdout's buffer: Python would try to write it at exit, and complain again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def serve(context: typer.Context) -> None:
    """Serve an IndexScorer over HTTP until SIGTERM; see serve --help for its settings."""
    from server.serve import main

    raise typer.Exit(main(context.args))


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
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
