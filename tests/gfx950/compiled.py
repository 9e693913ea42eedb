"""The prefill scorers as the compiler writes them, each compiled once in a test session."""

from __future__ import annotations

import json
import os

import pytest

from kernel.backends.flydsl import toolchain
from kernel.gfx950.report.kernel_report import KernelReport, report_kernel

_assembly = toolchain.assembly  # a test may replace it
_reports: dict[int, KernelReport] = {}


def assembly(heads: int, session: pytest.TempPathFactory) -> tuple[str, str]:
    """Name and assembly text; workers of a session share what one of them compiled."""
    folder = session.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"score_prefill_h{heads}.json"
    if not path.is_file():
        own = folder / f"{path.name}.{os.getpid()}"
        own.write_text(json.dumps(_assembly(heads)))
        own.replace(path)  # whole or not at all, whoever else is reading
    name, text = json.loads(path.read_text())
    return name, text


def report(heads: int, session: pytest.TempPathFactory) -> KernelReport:
    """The report on the compiled kernel."""
    if heads not in _reports:
        name, text = assembly(heads, session)
        _reports[heads] = report_kernel(text, name, heads)
    return _reports[heads]
