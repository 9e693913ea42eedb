"""``doctor``: what this machine has, which backends can run, and whether the one in use computes right."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import typer

from client.output import MISMATCH, BackendOption, JsonOption, one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("nvfp4-indexer", "torch", "flydsl", "triton", "numpy", "ml_dtypes", "safetensors", "matplotlib")


def doctor(backend: BackendOption = "auto", as_json: JsonOption = False) -> None:
    """Say what this machine has, which backends can run and why the others cannot, and test the one in use.

    Exit code 0 only if the backend's self-test agrees with the oracle.
    """
    from client.output import output, status
    from indexer.verify import run_selftest
    from kernel.backends import registry

    with one_line_errors(as_json), status() as on_step:
        on_step("looking around")
        chosen = registry.resolve(backend)
        found_versions, found_devices = versions(), devices()
        backends = [dataclasses.asdict(found) for found in registry.statuses()]
        on_step(f"testing {chosen} against the oracle")
        test = run_selftest(chosen)
    if as_json:
        fields = {
            "versions": found_versions,
            "devices": found_devices,
            "backends": backends,
            "backend": chosen,
            "selftest": dataclasses.asdict(test),
        }
        print(json.dumps(fields))
    else:
        console = output()
        console.print(_pairs("versions", found_versions))
        console.print(_pairs("devices", found_devices))
        console.print(_backend_table(backends, chosen))
        verdict = "RIGHT: {} agrees" if test.ok else "WRONG: {} does not agree"
        console.print(
            f"Self-test {verdict.format(chosen)} with the oracle in {test.rows} rows (score error "
            f"{test.max_score_error:.2g} of {test.score_tolerance:.2g} allowed, {test.topk_mismatches} rows "
            f"mismatched, {test.seconds:.2f} s).",
            style="green" if test.ok else "bold red",
        )
    if not test.ok:
        raise typer.Exit(MISMATCH)


def versions() -> dict[str, str]:
    """Python, the system, and the packages that matter."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> dict[str, str]:
    """Processors and GPUs."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    found = {"cpu": f"{platform.processor() or platform.machine()}, {cores} cores, {threads} threads"}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        arch = getattr(device, "gcnArchName", None) or f"sm_{device.major}{device.minor}"
        found[f"cuda:{index}"] = f"{device.name} ({arch}), {device.total_memory / 2**30:.0f} GiB"
    if len(found) == 1:
        kind = "HIP" if torch.version.hip else "CUDA" if torch.version.cuda else None
        found["gpu"] = "none that torch sees" if kind else "none: this torch is a CPU build"
    return found


def _pairs(title: str, pairs: dict[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(title)
    table.add_column("")
    for name, value in pairs.items():
        table.add_row(name, value)
    return table


def _backend_table(backends: list[dict[str, Any]], chosen: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("backend")
    table.add_column("usable")
    table.add_column("why", overflow="fold")
    for found in backends:
        name = Text(found["name"] + (" (in use)" if found["name"] == chosen else ""))
        table.add_row(
            name, Text("yes", "green") if found["usable"] else Text("no", "yellow"), Text(found["reason"])
        )
    return table
