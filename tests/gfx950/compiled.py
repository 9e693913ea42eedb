"""The scorers as the compiler writes them, each compiled once in a test session."""

from __future__ import annotations

import os

import pytest

from kernel.backends.flydsl import geometry, toolchain
from kernel.backends.flydsl.geometry import KeyType, Layout, Variant
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
