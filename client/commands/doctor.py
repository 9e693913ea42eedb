"""``doctor``: what this machine has, which backends can run, and whether the one in use computes right."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from importlib import metadata
from typing import Any

import typer
from rich.text import Text

from client.output import MISMATCH, BackendOption, Cells, JsonOption, one_line_errors, output, status

PACKAGES = ("nvfp4-indexer", "torch", "flydsl", "triton", "numpy", "ml_dtypes", "safetensors", "matplotlib")


def doctor(backend: BackendOption = "auto", as_json: JsonOption = False) -> None:
    """Say what this machine has, which backends can run and why the others cannot, and test the one in use.

    Exit code 0 only if the backend's self-test agrees with the oracle.
    """
    from indexer.verify import run_selftest
    from kernel.backends import registry

    with one_line_errors(as_json), status() as on_step:
        on_step("inspecting this machine")
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
        for title, pairs in (("versions", found_versions), ("devices", found_devices)):
            console.print(Cells((title, ""), list(pairs.items()), words=(0, 1)).table())
        console.print(_backend_cells(backends, chosen).table())
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
    """Returns the versions of Python, the system and the packages that matter."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> dict[str, str]:
    """Returns the processor and the GPUs."""
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


def _backend_cells(backends: list[dict[str, Any]], chosen: str) -> Cells:
    rows = [
        (
            found["name"] + (" (in use)" if found["name"] == chosen else ""),
            Text("yes", "green") if found["usable"] else Text("no", "yellow"),
            found["reason"],
        )
        for found in backends
    ]
    return Cells(("backend", "usable", "why"), rows, words=(0, 1, 2))
