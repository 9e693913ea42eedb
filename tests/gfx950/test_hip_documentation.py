"""The example of docs/gfx950-simulation.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.process import printed_by
from tests.support.real_cases import ROOT


def test_the_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "gfx950-simulation.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = tmp_path / "example.py"  # a file: FlyDSL reads a kernel's source
    program.write_text(example)
    printed = printed_by(program, PYTHONPATH=str(ROOT))
    promised = re.search(r"print\(x\[:4\]\) +# (.*)", example)
    assert promised is not None
    assert printed.strip() == promised[1]
