"""``kernel first-run``: checks, times and counts every kernel on its first MI355X; see ``docs/gfx950.md``.

The parent, ``client.commands.first_run``, runs each part as a process of its own (``run_part``), because a
GPU fault kills the process that meets it, and keeps what the parts print (``record``). The child, ``python -m
client.first_run PART`` (``__main__``), runs one part (``checks``, ``speed``) where ``setting`` says, and
prints a JSON object a line for each item.
"""

from __future__ import annotations

SIMULATED = "flydsl-sim"
BACKENDS = ("flydsl", SIMULATED)
"""The backends that launch the gfx950 kernels."""
DOCTOR, VERIFY = "doctor", "verify"
PARTS = (
    DOCTOR,
    VERIFY,
    "check-cases",
    "check-decode",
    "check-select",
    "check-topk",
    "check-insert",
    "speed-prefill",
    "speed-decode",
    "speed-topk",
    "speed-insert",
    "counters",
)
"""In the order in which they run. The first two are commands of this program, the others the child's."""
