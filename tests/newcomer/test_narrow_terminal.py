"""Tables on a terminal of 40 columns: its lines wrap, and no figure is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import call
from tests.support.real_cases import CODE, CUT


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize(
    "words",
    [("fidelity", CODE), ("profile", CUT, "--repeats", "1")],
)
def test_no_figure_is_cut(
    words: tuple[str | Path, ...], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    text = call(*words, "--backend", "cpu").stdout
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) > 60
