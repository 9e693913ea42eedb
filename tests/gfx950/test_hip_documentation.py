"""The example of docs/gfx950-simulation.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "gfx950-simulation.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = tmp_path / "example.py"  # a file: FlyDSL reads a kernel's source
    program.write_text(example)
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    promised = re.search(r"print\(x\[:4\]\) +# (.*)", example)
    assert promised is not None
    assert done.stdout.strip() == promised[1]
