"""What a row takes of the top-k kernels: the bound lets pass exactly the columns that it is due to."""

from __future__ import annotations

import numpy as np
import pytest

from kernel.backends.flydsl.geometry import Variant
from kernel.gfx950 import RunReport
from tests.gfx950.bound_network import telling_rows
from tests.gfx950.test_topk import kernel_of
from tests.gfx950.topk_launch import TopkLaunch
from tests.gfx950.topk_rows import Row


def compares(report: RunReport) -> int:
    """Comparisons of candidates, whole waves."""
    return sum(num for name, num in report.by_mnemonic().items() if name in ("v_cmp_gt_i64", "v_cmp_lt_i64"))


def due(row: Row, best: int) -> int:
    """Of a row of 256 columns, four neighbours a lane, of which at most 64 pass: 16 candidates unasked, then
    four at a time; half of them where both halves of the wave share the work."""
    lanes = np.sort(row.scores.reshape(64, 4), 1)[:, ::-1]
    bound = np.sort(lanes[:, : 1 if best < 64 else 2].ravel())[-best]
    passing = int((row.scores >= bound).sum())
    assert best <= passing <= 64
    compared = 16 + 4 * -(-max(passing - 16, 0) // 4)
    return compared // 2 if passing <= 32 else compared


@pytest.mark.parametrize("variant", [Variant(16), Variant(16, 64), Variant(32)], ids=lambda v: str(v.name))
def test_the_bound_lets_pass_what_it_is_due_to(variant: Variant) -> None:
    """Rows chosen to tell of each exchange of the network, and random ones."""
    random = np.random.default_rng(1)
    rows = [row for row in telling_rows(variant.best, False) if row.scores.size == 256]
    rows += [Row("normal", random.standard_normal(256).astype(np.float32)) for _ in range(4)]
    report = TopkLaunch("due", variant, [rows], variant.best).run(kernel_of(variant))
    assert compares(report) == sum(due(row, variant.best) for row in rows)
