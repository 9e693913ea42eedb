"""``report``: one file with everything in it and nothing outside of it."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from indexer.case import read_case, write_case
from tests.support.command import call
from tests.support.faulty_engine import Bytes, Engine, engine_case
from tests.support.raw_case import small_case
from tests.support.real_cases import CUT


class Swapped(Engine):
    def codes(self, page: Bytes) -> Bytes:
        return super().codes((page >> 4 | page << 4).astype("u1"))


class Page(HTMLParser):
    """Collects tags that are open and addresses that are named."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.links.append(str(value))
            if name == "id":
                self.ids.add(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def written(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [], "every tag is closed"
    assert not re.search(r"@import|url\(|<script|<link", text)
    for link in page.links:
        assert link.startswith("data:image/png;base64,") or link[1:] in page.ids
    return page


def test_a_right_case(tmp_path: Path) -> None:
    out = tmp_path / "new" / "r.html"
    result = call("report", CUT, "--backend", "cpu", "--repeats", "1", "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    assert fields["ok"] is True
    assert fields["bytes"] == out.stat().st_size
    page = written(out)
    assert {"summary", "backend", "fidelity", "profile", "scores-and-selection", "machine"} <= page.ids
    assert sum(link.startswith("data:") for link in page.links) == 3
    text = out.read_text()
    for word in ("backend right", "TFLOP/s", "Recall of NVFP4 keys", "python"):
        assert word in text


def test_a_faulty_engine_and_a_hostile_source(tmp_path: Path) -> None:
    case = Swapped(engine_case([(900, 12), (700, 3)])).run()
    path = tmp_path / "c<b>.safetensors"
    write_case(dataclasses.replace(case, source="<script>alert(1)</script> & more"), path)
    out = tmp_path / "r.html"
    result = call("report", path, "--backend", "cpu", "--repeats", "1", "--out", out)
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    written(out)
    text = out.read_text()
    assert "nibbles are swapped" in text
    assert "engine wrong" in text
    assert "&lt;script&gt;" in text
    assert "not the keys they were quantised from" in text


def test_queries_that_are_not_finite_leave_the_rest_of_the_report(tmp_path: Path) -> None:
    case = small_case()
    case.index_q[1, 0, 3] = np.nan
    path, out = tmp_path / "c.safetensors", tmp_path / "r.html"
    write_case(case, path)
    assert call("report", path, "--backend", "cpu", "--repeats", "1", "--out", out).exit_code == 1
    assert {"not-judged", "profile", "scores-and-selection"} <= written(out).ids
    text = out.read_text()
    assert "index_q[1, 0, 3] = nan" in text
    assert "Some queries are not finite: what cheaper keys cost them is not known." in text


def test_the_case_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_case(read_case(CUT), path)
    before = path.read_bytes()
    assert call("report", path, "--out", path).exit_code == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", [("--repeats", "0"), ("--backend", "abacus")])
def test_refusals_write_nothing(tmp_path: Path, words: tuple[str, str]) -> None:
    out = tmp_path / "r.html"
    assert call("report", CUT, *words, "--out", out).exit_code == 2
    assert not out.exists()
