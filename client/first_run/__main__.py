"""The child process: runs a part, prints a JSON object a line for each item; exit code 0 if all are right."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from client.first_run import BACKENDS, checks, speed
from client.first_run.setting import Item, Setting

OWN_PARTS: dict[str, Callable[[Setting], Iterator[Item]]] = {
    "check-cases": checks.cases,
    "check-decode": checks.decode,
    "check-select": checks.select,
    "check-topk": checks.topk,
    "check-insert": checks.insert,
    "speed-prefill": speed.prefill,
    "speed-decode": speed.decode,
    "speed-topk": speed.topk,
    "speed-insert": speed.insert,
    "counters": speed.counters,
}
"""Those of :data:`client.first_run.PARTS` that are no commands of this program."""


def main(arguments: list[str]) -> int:
    """Run a part; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=OWN_PARTS)
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--folder", type=Path, default=Path("first-run"), help="for the part's own files")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    right = True
    for item in OWN_PARTS[options.part](Setting(options.backend, options.folder)):
        print(json.dumps(item), flush=True)
        right = right and item["ok"] is not False
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
