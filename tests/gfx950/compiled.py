"""Compiled kernels, their reports and a library of them: each is made once in a test session.

Kernels are read from NAME.s in the folder that NVFP4_INDEXER_TEST_ASSEMBLY names; a missing one is compiled
into it. Where the variable is not set, the folder is kept for later sessions of these sources and compiler.
Tests and mutation campaigns that only interpret the assembly run from saved files, without FlyDSL.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import KeyType, Layout, Variant
from kernel.backends.flydsl.kernel_library import FILE_NAME, export_library
from kernel.backends.flydsl.toolchain import assembly as compile_kernel
from kernel.gfx950 import Kernel, parse_program
from kernel.gfx950.report.decode import DecodeReport, report_decode
from kernel.gfx950.report.prefill import KernelReport, report_kernel
from kernel.gfx950.report.work import WorkReport, report_insert, report_topk
from tests.support.cases import ROOT

FOLDER = "NVFP4_INDEXER_TEST_ASSEMBLY"
SESSION = "NVFP4_INDEXER_TEST_SESSION"
"""Names the folder that the workers of a test session share."""
Made = TypeVar("Made")


def kept_folder() -> Path:
    """Where assembly stays as long as what it is made of: our sources, FlyDSL, its settings, Python."""
    made_of = hashlib.sha256(repr((version("flydsl"), sys.version)).encode())
    for name, value in sorted(os.environ.items()):
        if name.startswith("FLYDSL_"):
            made_of.update(f"{name}={value}\n".encode())
    for path in sorted((ROOT / "kernel").rglob("*.py")):
        made_of.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    kept = ROOT / ".pytest_cache" / "assembly"
    folder = kept / made_of.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for other in kept.iterdir():
        if other != folder and time.time() - other.stat().st_mtime > 7 * 24 * 3600:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def assembly(name: str) -> str:
    """A kernel's assembly text."""
    path = Path(os.environ[FOLDER], f"{name}.s")
    with _made_once(path) as missing:
        if missing is not None:
            missing.write_text(compile_kernel(name))
    return path.read_text()


@cache
def kernel(name: str) -> Kernel:
    """A kernel, parsed."""
    return parse_program(assembly(name)).kernels[name]


def shared(name: str, make: Callable[[], Made]) -> Made:
    """What ``make`` returns to the first worker of the session that asks; the others unpickle it."""
    if SESSION not in os.environ:
        return make()
    path = Path(os.environ[SESSION], f"{name}.pickle")
    with _made_once(path) as missing:
        if missing is not None:
            missing.write_bytes(pickle.dumps(make()))
    made: Made = pickle.loads(path.read_bytes())  # noqa: S301  written above
    return made


@contextmanager
def _made_once(path: Path) -> Iterator[Path | None]:
    """Where to write what ``path`` is to hold, None where it is there. One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            yield None
            return
        written = path.with_name(f"{path.name}.new")
        yield written
        written.replace(path)


@cache
def report(heads: int) -> KernelReport:
    """The report on a prefill scorer."""
    name = geometry.prefill_name(heads)
    return shared(f"report of {name}", lambda: report_kernel(assembly(name), name, heads))


@cache
def decode_report(heads: int, layout: Layout) -> DecodeReport:
    """The report on a decode scorer."""
    name = geometry.decode_name(heads, layout)
    return shared(f"report of {name}", lambda: report_decode(assembly(name), name, heads, layout))


@cache
def work_report(kernel: Variant | KeyType) -> WorkReport:
    """The report on a top-k or insert kernel."""
    if isinstance(kernel, Variant):
        return shared(f"report of {kernel.name}", lambda: report_topk(assembly(kernel.name), kernel))
    name = geometry.insert_name(kernel)
    return shared(f"report of {name}", lambda: report_insert(assembly(name), name, kernel))


# ---- A kernel library of the kernels that tests launch ----

KERNELS = ("score_prefill_h4", "score_decode_h4", "topk_scan_k16", "topk_group_k16_b1024", "insert_bf16")


def library() -> Path:
    """The library's path."""
    path = Path(os.environ[SESSION], "kernel_library", FILE_NAME)
    with _made_once(path) as missing:
        if missing is not None:
            exported = export_library(missing.with_name("exported"), KERNELS)
            assert exported == (missing.with_name("exported") / FILE_NAME, list(KERNELS))
            exported[0].replace(missing)
    return path


# ---- Figures of the compiled kernels against ``kernel_limits.json``: none may get worse ----
#
# A change that makes a figure better should lower its limit, with what ``nvfp4-indexer kernel report --json``
# says. Every clock is a prediction.

Figures = dict[str, Any]

LIMITS: dict[str, Figures] = json.loads(Path(__file__).with_name("kernel_limits.json").read_text())
AT_LEAST = (
    "waves_per_simd",
    "mfma_share",
    "predicted_utilisation",
    "predicted_utilisation_beside_unmasked",
)
"""Figures whose limit is a floor; every other one has a ceiling."""


def worse(fields: Figures) -> list[str]:
    """The figures of a kernel's report that are worse than its limits."""
    return [
        f"{place}{key} {found[key]}, limit {limit}"
        for place, found, limits in _places(fields)
        for key, limit in limits.items()
        if (found[key] < limit if key in AT_LEAST else found[key] > limit)
    ]


def assert_every_limit_bites(fields: Figures, at_least: int) -> None:
    """Each of at least so many figures, made a little worse than its limit, alone, is seen."""
    tried = 0
    for place, found, limits in _places(fields):
        for key, limit in limits.items():
            if limit == 0 and key in AT_LEAST:
                continue  # a share of nothing cannot get worse
            before, found[key] = found[key], limit * 0.999 if key in AT_LEAST else limit + 1
            assert worse(fields) == [f"{place}{key} {found[key]}, limit {limit}"]
            found[key] = before
            tried += 1
    assert tried >= at_least


def _places(fields: Figures) -> Iterator[tuple[str, Figures, Figures]]:
    """The kernel, its page, and each of its loops and shapes: figures and limits."""
    limits = LIMITS[fields["name"]]
    yield "", fields, {key: limit for key, limit in limits.items() if not isinstance(limit, dict)}
    if "page" in limits:
        yield "page: ", fields["page"], limits["page"]
    for part, label in (("loops", "role"), ("works", "shape")):
        found = {one[label]: one for one in fields.get(part, ())}
        for name, own in limits.get(part, {}).items():
            yield f"{name}: ", found[name], own
