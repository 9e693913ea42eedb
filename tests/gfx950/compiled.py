"""The scorers as the compiler writes them, each compiled once in a test session."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel.backends.flydsl import geometry, toolchain
from kernel.backends.flydsl.geometry import KeyType, Layout, Variant
from kernel.backends.flydsl.kernel_library import FILE_NAME
from kernel.backends.flydsl.library_export import export_library
from kernel.gfx950.report.decode import DecodeReport, report_decode
from kernel.gfx950.report.prefill import KernelReport, report_kernel
from kernel.gfx950.report.work import WorkReport, report_insert, report_topk

_compile = toolchain.assembly  # a test may replace it
_reports: dict[int, KernelReport] = {}
_decode_reports: dict[tuple[int, Layout], DecodeReport] = {}
_work_reports: dict[Variant | KeyType, WorkReport] = {}


def assembly(name: str, session: pytest.TempPathFactory) -> str:
    """A kernel's assembly text; workers of a session share what one of them compiled."""
    folder = session.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"{name}.s"
    if not path.is_file():
        own = folder / f"{path.name}.{os.getpid()}"
        own.write_text(_compile(name))
        own.replace(path)  # whole or not at all, whoever else is reading
    return path.read_text()


def report(heads: int, session: pytest.TempPathFactory) -> KernelReport:
    """The report on the compiled kernel."""
    if heads not in _reports:
        name = geometry.prefill_name(heads)
        _reports[heads] = report_kernel(assembly(name, session), name, heads)
    return _reports[heads]


def decode_report(heads: int, layout: Layout, session: pytest.TempPathFactory) -> DecodeReport:
    """The report on the compiled decode scorer."""
    key = heads, layout
    if key not in _decode_reports:
        name = geometry.decode_name(heads, layout)
        _decode_reports[key] = report_decode(assembly(name, session), name, heads, layout)
    return _decode_reports[key]


def work_report(kernel: Variant | KeyType) -> WorkReport:
    """The report on a top-k or insert kernel, compiled now."""
    if kernel not in _work_reports:
        if isinstance(kernel, Variant):
            _work_reports[kernel] = report_topk(_compile(kernel.name), kernel)
        else:
            name = geometry.insert_name(kernel)
            _work_reports[kernel] = report_insert(_compile(name), name, kernel)
    return _work_reports[kernel]


# A kernel library of the kernels that tests launch, exported once in a test session.

KERNELS = ("score_prefill_h4", "score_decode_h4", "topk_scan_k16", "topk_group_k16_b1024", "insert_bf16")


def library(session: pytest.TempPathFactory) -> Path:
    """The library's path; workers of a session share what one of them exported."""
    folder = session.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "kernel_library.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "kernel_library" / FILE_NAME
        if not path.is_file():
            assert export_library(path.parent, KERNELS) == (path, list(KERNELS))
    return path


# Figures of the compiled kernels against ``kernel_limits.json``: none may get worse.
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
