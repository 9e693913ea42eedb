"""What rocprofv3 says about the kernels, where it is installed."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from indexer.case import write_case
from indexer.first_run.attempt import Item, attempt
from indexer.first_run.setting import Setting
from indexer.made_cases import Shape, make_case
from indexer.rocprof import read_rocprof, rocprof_commands

_TIMEOUT_S = 400
"""Of a command; four of them and their cases fit into the half hour of a part."""
_SHOWN_CHARS = 2000
"""Of what a failed command printed."""


def counters(setting: Setting) -> Iterator[Item]:
    """Traces and counters of a prefill and of a decode step, insert and top-k among them."""
    if shutil.which("rocprofv3") is None:
        again = ["nvfp4-indexer", "kernel", "first-run", "--out", str(setting.folder / "counters")]
        again += ["--backend", setting.backend, "--part", "counters"]
        remedy = f"rocprofv3 is not on the path: put ROCm's bin folder there, then run {shlex.join(again)}"
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
        yield attempt(f"{name}, kernels", partial(_kernels, setting, folder))


def _commands(setting: Setting, name: str, shape: Shape, folder: Path) -> tuple[list[str], list[str]]:
    setting.folder.mkdir(parents=True, exist_ok=True)
    case = setting.folder / f"{name}.safetensors"
    write_case(make_case("m3", shape), case)
    profile = ["profile", str(case), "--backend", setting.backend, "--cache", "warm"]
    repeats = ["--repeats", str(min(setting.sizes.repeats, 5))]
    return rocprof_commands([sys.executable, "-m", "client.cli", *profile, *repeats], str(folder))


def _run(command: list[str]) -> Item:
    # A file, not a pipe: what a killed rocprofv3 leaves behind would hold a pipe open, beyond the limit.
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S)
        printed.seek(0)
        shown = printed.read()[-_SHOWN_CHARS:]
    if done.returncode:
        return {"ok": False, "command": command, "error": f"exit code {done.returncode}: {shown}"}
    return {"command": command}


def _kernels(setting: Setting, folder: Path) -> Item:
    found = [dataclasses.asdict(kernel) for kernel in read_rocprof(folder)]
    return {"measured": not setting.simulated, "kernels": found}
