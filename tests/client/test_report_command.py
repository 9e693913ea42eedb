"""``report``: one file with everything in it and nothing outside of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from client.plots import MAX_BLOCKS, MAX_QUERIES, ScoreMap, draw_score_map
from client.report import page
from client.report.page import picture
from client.rocprof import read_rocprof, rocprof_command
from indexer.case import Case, read_case, write_case
from kernel.errors import InvalidArgumentError
from tests.support.cases import CODE, CUT, small_case
from tests.support.faulty_engine import engine_case
from tests.support.planted import FAULTS
from tests.support.process import call, spawn


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


@pytest.fixture(scope="module")
def right_case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A report of a case that is right, which has no prefill, so that no plan is drawn."""
    out: Path = tmp_path_factory.mktemp("report") / "new" / "r.html"
    return out, call("report", CUT, "--backend", "cpu", "--repeats", "1", "--out", out, "--json")


def test_a_right_case(right_case: tuple[Path, Result]) -> None:
    out, result = right_case
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
    case = FAULTS["NibblesSwapped"].run(engine_case([(900, 12), (700, 3)]))
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


def test_letters_are_of_one_size_in_every_picture(right_case: tuple[Path, Result]) -> None:
    """A picture of one plot is not stretched to the width of one of three."""
    out, _ = right_case
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
    monkeypatch.setattr(page, "MAX_MAP_CELLS", 2 * 64 * 10)
    shown, name = page._mapped(case)
    assert shown is not None
    assert shown.total_q == 10
    assert (shown.index_q == case.index_q[-10:]).all()
    assert name == "request 0, its last 10 queries"
    monkeypatch.undo()
    assert page._mapped(case) == (case, "")


# A report stays small enough to be mailed, whatever the call.

MAX_PAGE_BYTES = 2_000_000
"""Of a report; docs/profile.md says so."""


@pytest.mark.nightly
def test_the_worst_map_leaves_room_for_the_rest() -> None:
    """Noise, which no picture can be smaller than: every cell and every outline differs from the next."""
    random = np.random.default_rng(0)
    shape = (MAX_QUERIES, MAX_BLOCKS)
    noise = ScoreMap(
        request=0,
        head=0,
        positions=np.arange(MAX_QUERIES),
        queries=65536,
        first_block=8192 - MAX_BLOCKS,
        scores=random.standard_normal(shape).astype(np.float32),
        selected=random.random(shape) < 0.5,
        picked=random.integers(0, 65536, MAX_BLOCKS),
        picked_forced=np.zeros(MAX_BLOCKS, dtype=np.int64),
        topk=64,
    )
    assert len(picture(draw_score_map(noise, "request 0"), "")) < 0.75 * MAX_PAGE_BYTES


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_million_tokens_of_four_heads(tmp_path: Path) -> None:
    case, out = tmp_path / "c.safetensors", tmp_path / "r.html"
    made = call("case", "make", "m3", "--context", "1048576", "--queries", "128", "--out", case)
    assert made.exit_code == 0, made.stderr
    result = call("report", case, "--backend", "cpu", "--repeats", "1", "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["bytes"] == out.stat().st_size < MAX_PAGE_BYTES


# ``fidelity``: tables, JSON, pictures, refusals.


def test_json_has_every_figure(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "f.svg"
    result = call("fidelity", CODE, "--backend", "cpu", "--picture", picture, "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert [found["name"] for found in fields["formats"]] == ["fp8", "nvfp4"]
    assert fields["formats"][1]["mean"] == pytest.approx(0.9348, abs=5e-5)
    assert len(fields["formats"][1]["heads"]) == 2
    assert len(fields["worst_rows"]) == 10
    text = picture.read_text()
    assert text.lstrip().startswith("<?xml")


def test_people_get_tables_and_several_cases_one_picture(tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    call("case", "make", "low-contrast", "--out", made, "--context", "5000", "--queries", "4")
    picture = tmp_path / "f.png"
    result = call("fidelity", CODE, made, "--backend", "cpu", "--picture", picture)
    assert result.exit_code == 0
    assert "recall mean" in result.stdout
    assert "Rows that NVFP4 keys cost most" in result.stdout
    assert " ".join(result.stdout.split()).count("rows have a choice") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    result = call("fidelity", CODE, "--picture", tmp_path / "f.jpg")
    assert result.exit_code == 2
    assert "--picture" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_case_is_drawn_over(tmp_path: Path) -> None:
    case = tmp_path / "case.png"
    case.write_bytes(CODE.read_bytes())
    result = call("fidelity", CODE, case, "--picture", case)
    assert result.exit_code == 2
    assert "is the case itself" in result.stderr
    assert case.read_bytes() == CODE.read_bytes()


def case_without_contrast(path: Path, query: float, key: float) -> Path:
    case = Case(
        index_q=np.full((4, 1, 128), query, np.float32),
        index_k=np.full((3000, 128), key, np.float32),
        cu_seqlens_q=np.array([0, 4], np.int32),
        seq_lens=np.array([3000], np.int32),
    )
    write_case(case, path)
    return path


def test_rows_that_miss_nothing_are_not_shown_as_the_worst(tmp_path: Path) -> None:
    path = case_without_contrast(tmp_path / "c.safetensors", 1.0, 1.0)
    assert "No row misses a block" in call("fidelity", path, "--backend", "cpu").stdout
    assert json.loads(call("fidelity", path, "--backend", "cpu", "--json").stdout)["worst_rows"] == []


@pytest.mark.parametrize(
    ("query", "key", "argument"),
    [
        (1e30, 1e30, "index_q . index_k [head 0, token 0, block 0] = inf"),
        (-1e30, 1e30, "index_q . index_k [head 0, token 0, block 0] = -inf"),
        (float("nan"), 1.0, "index_q[0, 0, 0] = nan"),
        (1.0, float("inf"), "index_k[0, 0] = inf"),
    ],
)
def test_what_is_not_finite_is_refused_by_name(
    tmp_path: Path, query: float, key: float, argument: str
) -> None:
    result = call(
        "fidelity", case_without_contrast(tmp_path / "c.safetensors", query, key), "--backend", "cpu"
    )
    assert result.exit_code == 2
    assert argument in result.stderr
    assert len(result.stderr.splitlines()) == 1


# What rocprofv3 writes, read by its column names.

TRACE = (
    '"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
    '"KERNEL_DISPATCH",1,1,16,"score_prefill_h4(float*, int)",1,1000,4000\n'
    '"KERNEL_DISPATCH",1,1,16,"score_prefill_h4(float*, int)",2,5000,12000\n'
    '"KERNEL_DISPATCH",1,1,17,"topk",3,12000,12500\n'
)
COUNTERS = (
    '"Dispatch_Id","Grid_Size","Kernel_Name","Counter_Name","Counter_Value"\n'
    '1,131072,"topk","SQ_WAVES",512\n2,131072,"topk","SQ_WAVES",514\n1,131072,"insert","SQ_BUSY_CYCLES",1e3\n'
)


def test_times_and_counters_meet_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "host" / "123"
    folder.mkdir(parents=True)
    (folder / "1_kernel_trace.csv").write_text(TRACE)
    (folder / "2_counter_collection.csv").write_text(COUNTERS)
    (folder / "agent_info.csv").write_text("Node_Id,Name\n0,gfx950\n")
    score, topk, insert = read_rocprof(tmp_path)
    assert (score.name, score.dispatches) == ("score_prefill_h4(float*, int)", 2)
    assert (score.total_us, score.median_us, score.min_us) == (10.0, 5.0, 3.0)
    assert (topk.total_us, topk.counters) == (0.5, {"SQ_WAVES": 513.0})
    assert (insert.dispatches, insert.counters) == (1, {"SQ_BUSY_CYCLES": 1000.0})


@pytest.mark.parametrize(
    "text", ["", "Name,Value\n1,2\n", TRACE.replace("4000", "soon"), TRACE.split("\n")[0] + "\n\x00\n"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kernel_trace.csv").write_text(text)
    with pytest.raises(InvalidArgumentError, match="--rocprof"):
        read_rocprof(tmp_path)
    with pytest.raises(InvalidArgumentError, match="--rocprof"):
        read_rocprof(tmp_path / "missing")


def test_the_command_is_one_line_for_a_shell() -> None:
    words = shlex.split(rocprof_command("a case.safetensors", "out folder"))
    assert words.count("rocprofv3") == 2
    assert words.count("a case.safetensors") == 2
    assert "out folder" in words
    assert words.count("--") == 2


# ``profile``: cold beside warm, the plan, pictures, rocprofv3's files.


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


def test_a_trace_does_not_overwrite_the_case_and_says_nothing_of_its_own(tmp_path: Path) -> None:
    case = tmp_path / "c.safetensors"
    case.write_bytes(CUT.read_bytes())
    words = ("profile", case, "--backend", "cpu", "--repeats", "1", "--cache", "warm")
    for path in (case, tmp_path):
        refused = call(*words, "--trace", path)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: --trace = ")
    assert case.read_bytes() == CUT.read_bytes()
    done = spawn(*words, "--trace", tmp_path / "new" / "t.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "new" / "t.json").read_text())["traceEvents"]


def test_a_call_without_queries_is_compared_with_nothing(tmp_path: Path) -> None:
    case = Case(
        index_q=np.zeros((0, 1, 128), np.float32),
        index_k=np.zeros((0, 128), np.float32),
        cu_seqlens_q=np.zeros(1, np.int32),
        seq_lens=np.zeros(0, np.int32),
    )
    write_case(case, tmp_path / "c.safetensors")
    words = ("profile", tmp_path / "c.safetensors", "--backend", "cpu", "--repeats", "1")
    result = call(*words, "--picture", tmp_path / "p.png")
    assert result.exit_code == 0
    assert "no query" in result.stdout
    assert "times the floor" not in result.stdout


def test_one_thing_is_not_called_things() -> None:
    words = ("profile", CUT, "--backend", "cpu", "--repeats", "1", "--cache", "cold")
    assert "heads, up to" in call(*words).stdout
    assert "1 run\n" in call(*words).stdout
