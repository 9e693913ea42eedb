"""``report``: one file with everything in it and nothing outside of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from client.report import sections
from indexer.case import Case, read_case, write_case
from tests.support.command import call
from tests.support.faulty_engine import engine_case
from tests.support.planted.keys import NibblesSwapped
from tests.support.raw_case import small_case
from tests.support.real_cases import CODE, CUT


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
    case = NibblesSwapped(engine_case([(900, 12), (700, 3)])).run()
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


def flat_case(path: Path, queries: int, value: float) -> Path:
    case = Case(
        index_q=np.full((queries, 1, 128), value, np.float32),
        index_k=np.full((3000 if queries else 0, 128), value, np.float32),
        cu_seqlens_q=np.array([0, queries], np.int32),
        seq_lens=np.array([3000 if queries else 0], np.int32),
    )
    write_case(case, path)
    return path


@pytest.mark.parametrize(
    ("queries", "value", "says"),
    [
        (4, 1.0, "No row misses a block"),
        (0, 1.0, "no query"),
        (1, 1e30, "index_q . index_k [head 0, token 0, block 0] = inf"),
    ],
)
def test_a_call_with_nothing_to_compare_says_so(
    tmp_path: Path, queries: int, value: float, says: str
) -> None:
    path = flat_case(tmp_path / "c.safetensors", queries, value)
    out = tmp_path / "r.html"
    result = call("report", path, "--backend", "cpu", "--repeats", "1", "--out", out)
    assert (result.exit_code, result.stderr) == (0, "")
    written(out)
    text = out.read_text()
    assert says in text
    assert "nan" not in re.sub(r'src="[^"]*"', "", text)
    assert "Rows that NVFP4 costs most" not in text
    assert not re.search(r"\b1 (queries|heads|keys|runs)\b", text)


def test_letters_are_of_one_size_in_every_picture(tmp_path: Path) -> None:
    """A picture of one plot is not stretched to the width of one of three."""
    out = tmp_path / "r.html"
    call("report", CUT, "--backend", "cpu", "--repeats", "1", "--out", out)  # no prefill, so no plan is drawn
    sizes = []
    for tag in re.findall(r"<img [^>]*>", out.read_text()):
        png = base64.b64decode(tag.partition("base64,")[2].partition('"')[0])
        (width,) = re.findall(r'width="(\d+)"', tag)
        sizes.append((int(width), int.from_bytes(png[16:20], "big")))
    assert max(width for width, _ in sizes) == 1124
    assert min(width for width, _ in sizes) < 700
    assert all(abs(width / pixels - 1124 / 1625) < 1e-3 for width, pixels in sizes)


def test_of_a_large_call_the_end_of_one_request_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    case = read_case(CODE)  # 256 queries of 2 heads see 64 blocks
    monkeypatch.setattr(sections, "MAX_MAP_CELLS", 2 * 64 * 10)
    shown, name = sections._mapped(case)
    assert shown is not None
    assert shown.total_q == 10
    assert (shown.index_q == case.index_q[-10:]).all()
    assert name == "request 0, its last 10 queries"
    monkeypatch.undo()
    assert sections._mapped(case) == (case, "")
