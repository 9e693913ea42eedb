"""What rocprofv3 says about the kernels, where it is installed."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from indexer.case import write_case
from indexer.first_run.attempt import Item, attempt
from indexer.first_run.setting import Setting
from indexer.made_cases import Shape, make_case
from indexer.rocprof import read_rocprof, rocprof_commands

_TIMEOUT_S = 900
_SHOWN_CHARS = 2000
"""Of what a failed command printed."""


def counters(setting: Setting) -> Iterator[Item]:
    """Traces and counters of a prefill and of a decode step, insert and top-k among them."""
    if shutil.which("rocprofv3") is None:
        remedy = "rocprofv3 is not on the path: put ROCm's bin folder there, run --part counters again"
        yield {"name": "rocprofv3", "ok": None, "skipped": remedy}
        return
    if setting.simulated:
        shapes = {"prefill": Shape(300, 17, 1), "decode": Shape(300, 1, 1)}
    else:
        shapes = {"prefill": Shape(131_072, 8192), "decode": Shape(131_072, 1, batch=4)}
    for name, shape in shapes.items():
        folder = setting.folder / "rocprof" / name
        commands = _commands(setting, name, shape, folder)
        for what, command in zip(("trace", "counters"), commands):
            yield attempt(f"{name}, {what}", partial(_run, command))
        yield attempt(f"{name}, kernels", partial(_kernels, folder))


def _commands(setting: Setting, name: str, shape: Shape, folder: Path) -> tuple[list[str], list[str]]:
    setting.folder.mkdir(parents=True, exist_ok=True)
    case = setting.folder / f"{name}.safetensors"
    write_case(make_case("m3", shape), case)
    profile = ["profile", str(case), "--backend", setting.backend, "--cache", "warm"]
    repeats = ["--repeats", str(min(setting.sizes.repeats, 5))]
    return rocprof_commands([sys.executable, "-m", "client.cli", *profile, *repeats], str(folder))


def _run(command: list[str]) -> Item:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        shown = (done.stdout + done.stderr)[-_SHOWN_CHARS:]
        return {"ok": False, "command": command, "error": f"exit code {done.returncode}: {shown}"}
    return {"command": command}


def _kernels(folder: Path) -> Item:
    return {"kernels": [dataclasses.asdict(kernel) for kernel in read_rocprof(folder)]}
