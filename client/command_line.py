"""The command line as a whole: every way it can end as an exit code and at most one line."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from typer import Exit
from typer.core import TyperGroup

from client.failure import FAILURE, out_of_memory, printable, report

NAME = "nvfp4-indexer"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
READER_GONE = 141
"""Exit code after whoever read stdout went away: 128 + SIGPIPE."""


class CommandLine(TyperGroup):
    """The commands, ended as :data:`client.cli.EXIT_CODES` says."""

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
        except OSError as error:  # of files they are told by option or case: this is stdout's, or stderr's
            code = READER_GONE
            if not isinstance(error, BrokenPipeError):
                code = FAILURE
                with contextlib.suppress(OSError):
                    report(OSError(error.errno, error.strerror, error.filename or "stdout"), as_json)
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
            report(error, as_json)
        except Exception as error:
            if hasattr(error, "format_message"):  # typer's own, or click's, whichever typer is built on
                _report_usage(error, as_json)
            else:
                if not out_of_memory(error):
                    traceback.print_exc()
                report(error, as_json)
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
    """Let what is left in stdout's buffer go nowhere: at exit Python would try, and complain, again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
