"""``serve``: the sidecar."""

from __future__ import annotations

from typing import Any

import typer

PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of the command: its options are the server's settings, which are declared there only."""


def serve(context: typer.Context) -> None:
    """Serve an IndexScorer over HTTP until SIGTERM; see serve --help for its settings."""
    from server.serve import main

    raise typer.Exit(main(context.args))
