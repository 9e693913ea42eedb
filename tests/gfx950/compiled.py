"""The scorers as the compiler writes them, each compiled once in a test session."""

from __future__ import annotations

import json
import os

import pytest

from kernel.backends.flydsl import toolchain
from kernel.backends.flydsl.key_type import KeyType
from kernel.backends.flydsl.topk_variants import Variant
from kernel.gfx950.report.decode import DecodeReport, report_decode
from kernel.gfx950.report.insert import report_insert
from kernel.gfx950.report.kernel_report import KernelReport, report_kernel
from kernel.gfx950.report.topk import report_topk
from kernel.gfx950.report.work import WorkReport

_COMPILERS = {"prefill": toolchain.assembly, "decode": toolchain.decode_assembly}  # a test may replace them
_reports: dict[int, KernelReport] = {}
_decode_reports: dict[int, DecodeReport] = {}
_topk_assembly, _insert_assembly = toolchain.topk_assembly, toolchain.insert_assembly
_work_reports: dict[Variant | KeyType, WorkReport] = {}


def assembly(heads: int, session: pytest.TempPathFactory, kind: str = "prefill") -> tuple[str, str]:
    """Name and assembly text; workers of a session share what one of them compiled."""
    folder = session.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"score_{kind}_h{heads}.json"
    if not path.is_file():
        own = folder / f"{path.name}.{os.getpid()}"
        own.write_text(json.dumps(_COMPILERS[kind](heads)))
        own.replace(path)  # whole or not at all, whoever else is reading
    name, text = json.loads(path.read_text())
    return name, text


def report(heads: int, session: pytest.TempPathFactory) -> KernelReport:
    """The report on the compiled kernel."""
    if heads not in _reports:
        name, text = assembly(heads, session)
        _reports[heads] = report_kernel(text, name, heads)
    return _reports[heads]


def decode_report(heads: int, session: pytest.TempPathFactory) -> DecodeReport:
    """The report on the compiled decode scorer."""
    if heads not in _decode_reports:
        name, text = assembly(heads, session, "decode")
        _decode_reports[heads] = report_decode(text, name, heads)
    return _decode_reports[heads]


def work_report(kernel: Variant | KeyType) -> WorkReport:
    """The report on a top-k or insert kernel, compiled now."""
    if kernel not in _work_reports:
        if isinstance(kernel, Variant):
            _work_reports[kernel] = report_topk(_topk_assembly(kernel)[1], kernel)
        else:
            name, text = _insert_assembly(kernel)
            _work_reports[kernel] = report_insert(text, name, kernel)
    return _work_reports[kernel]
