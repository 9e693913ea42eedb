"""``profile``: cold beside warm, the plan, pictures, rocprofv3's files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import call
from tests.support.real_cases import CODE, CUT
from tests.unit.test_rocprof import TRACE


def test_cold_and_warm_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "x_kernel_trace.csv").write_text(TRACE)
    words = ("profile", CUT, "--backend", "cpu", "--repeats", "1", "--rocprof", tmp_path)
    fields = json.loads(call(*words, "--json").stdout)
    assert (fields["cache"], fields["warm"]["cache"]) == ("cold", "warm")
    assert fields["rocprof"][0]["total_us"] == 10.0
    assert fields["plan"] is None, "no request has more than 16 queries"
    text = call(*words).stdout
    for word in ("cold: median ms", "warm: median ms", "times the floor", "score_prefill_h4"):
        assert word in text
    fields = json.loads(call(*words[:-2], "--cache", "warm", "--json").stdout)
    assert (fields["cache"], fields["warm"], fields["rocprof"]) == ("warm", None, None)


def test_the_picture_has_roofline_and_plan(tmp_path: Path) -> None:
    picture = tmp_path / "p.svg"
    words = ("profile", CODE, "--backend", "cpu", "--repeats", "1", "--picture", picture)
    result = call(*words)
    assert result.exit_code == 0
    assert "gfx950 plan: " in result.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    assert call(*words[:-1], tmp_path / "p.gif").exit_code == 2
