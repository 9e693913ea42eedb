"""Each fault that can be named, planted alone: the file is called wrong, and the fault by its name."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from client.engine_report import print_engine
from client.report.page import engine_section
from indexer.case import Case, EngineRecord, read_case
from indexer.explain.findings import parts_at_fault
from indexer.explain.verdict import FAULT, RIGHT
from indexer.oracle import in_pages
from tests.support.cases import CODE
from tests.support.faulty_engine import Bytes, Engine, engine_case
from tests.support.planted import ALL, BOTH, FAULTS, ONLY_IDS, ONLY_SCORES, explained, only, planted
from tests.unit.test_explain_right import changed, reselect


def _params() -> list[Any]:
    """Each fault with all that it can be recorded by; all but the first in the nightly run."""
    params = []
    for key, fault in FAULTS.items():
        for record in fault.records:
            marks = [] if record == fault.records[0] else [pytest.mark.nightly]
            params.append(pytest.param(key, record, id=f"{key}-{record.replace(' ', '+')}", marks=marks))
    return params


@pytest.mark.parametrize(("key", "record"), _params())
def test_a_planted_fault_is_named(key: str, record: str) -> None:
    """And no other: of all that is tried on each file, one is named."""
    fault = FAULTS[key]
    verdict = explained(only(planted(key), record))
    assert not verdict.ok
    assert verdict.fault_rows > 0
    assert [(cause.name, cause.family) for cause in verdict.causes] == [(fault.name, fault.family)]
    cause = verdict.causes[0]
    assert cause.explained == cause.faulty
    assert cause.kept == cause.right
    assert cause.only == fault.only


@pytest.mark.parametrize("record", [BOTH, pytest.param(ONLY_IDS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "key",
    [
        "SwizzledByToken",
        "QueriesRotatedIn16Bits",
        *(pytest.param(key, marks=pytest.mark.nightly) for key in ("ScalesSwizzled", "QueriesRotated")),
    ],
)
def test_faults_that_permute_scales_or_rotate_queries_are_named_on_real_keys(key: str, record: str) -> None:
    """Scales of neighbouring tokens and groups are alike there, and queries have outlier channels."""
    real = read_case(CODE)
    case = dataclasses.replace(
        real,
        index_q=real.index_q[-10:],
        cu_seqlens_q=np.array([0, 10], dtype=np.int32),
        expected_scores=None,
        expected_block_ids=None,
    )
    verdict = explained(only(FAULTS[key].run(in_pages(case)), record))
    assert [cause.name for cause in verdict.causes] == [FAULTS[key].name]


# Pages that lie on both sides of 2^31 and 2^32 bytes in the engine's cache.

FAR_STRIDE = 9216 + 64


def far_case(held: bool) -> Case:
    """Page ids of a cache of 5 GB; the pages that a wrapped offset reads are in the file if ``held``."""
    case = engine_case()
    assert case.pages is not None
    count, stride = len(case.pages), FAR_STRIDE
    random = np.random.default_rng(5)
    ids = np.sort(random.choice((5 << 30) // stride, count, replace=False)).astype(np.int64)
    ids = random.permutation(ids)
    pages, all_ids = case.pages, ids
    if held:
        others = {
            int(i * stride % limit) // stride + n for i in ids for limit in (1 << 31, 1 << 32) for n in (0, 1)
        }
        extra = np.array(sorted(others - set(ids.tolist())), dtype=np.int64)
        all_ids = np.concatenate([ids, extra])
        more = random.integers(0, 256, (len(extra), 9216), dtype=np.uint8)
        more[:, 8192:] = random.integers(0x28, 0x48, (len(extra), 1024), dtype=np.uint8)
        pages = np.concatenate([pages, more])
    record = {"page_ids": all_ids.astype(np.int32), "page_stride": stride}
    return dataclasses.replace(case, pages=pages, engine=EngineRecord(**record))  # type: ignore[arg-type]


class Wrapping(Engine):
    """Reads a flat cache, of which only the file's pages are there, at an offset of 32 bits."""

    limit: int
    zero = False

    def page(self, request: int, block: int) -> Bytes:
        record = self.case.engine
        assert record is not None
        assert record.page_ids is not None
        place = int(self.table[request, block])
        offset = int(record.page_ids[place]) * record.page_stride
        if offset < self.limit:
            return self.at(place)
        if self.zero:
            return np.zeros(9216, dtype=np.uint8)
        start = offset % self.limit
        cache = {int(i) * record.page_stride: page for i, page in zip(record.page_ids, self.pages)}
        found = np.zeros(9216, dtype=np.uint8)
        for byte, page in cache.items():
            low, high = max(byte, start), min(byte + 9216, start + 9216)
            if low < high:
                found[low - start : high - start] = page[low - byte : high - byte]
        return found


@pytest.mark.parametrize(
    "record",
    [BOTH, *(pytest.param(record, marks=pytest.mark.nightly) for record in (ONLY_SCORES, ONLY_IDS))],
)
@pytest.mark.parametrize("power", [31, 32])
@pytest.mark.parametrize("what", ["wraps", "zero", "unknown"])
def test_page_offsets_of_32_bits_are_named(power: int, what: str, record: str) -> None:
    engine = Wrapping(far_case(held=what == "wraps"))
    engine.limit, engine.zero = 1 << power, what == "zero"
    case = engine.run(record)
    if what == "unknown":
        # What was read is not in the file: here the page's own bytes, backwards.
        class Elsewhere(Wrapping):
            def page(self, request: int, block: int) -> Bytes:
                page = Engine.page(self, request, block)
                record = self.case.engine
                assert record is not None
                assert record.page_ids is not None
                place = int(self.table[request, block])
                return page[::-1] if int(record.page_ids[place]) * record.page_stride >= 1 << power else page

        case = Elsewhere(far_case(held=False)).run(record)
    verdict = explained(case)
    name = {
        "wraps": f"page offsets wrap at 2^{power}",
        "zero": f"pages past 2^{power} bytes are read as zero",
        "unknown": f"pages past 2^{power} bytes are read from somewhere else",
    }[what]
    if what == "unknown" and record == ONLY_IDS:
        names = [cause.name for cause in (*verdict.causes, *verdict.candidates)]
        assert name in names
        return
    assert [(cause.name, cause.family) for cause in verdict.causes] == [(name, "page id wrap")]


def test_two_faults_at_once_are_not_called_one() -> None:
    steps = {**FAULTS["NibblesSwapped"].steps, **FAULTS["NoPrefix"].steps}
    verdict = explained(Engine(engine_case(), **steps).run())
    assert verdict.causes == ()


def test_random_ids_have_no_cause() -> None:
    case = Engine(engine_case()).run(ONLY_IDS)
    assert case.engine is not None
    assert case.engine.block_ids is not None
    random = np.random.default_rng(0)
    ids = case.engine.block_ids.copy()
    for head, token in np.ndindex(ids.shape[:2]):
        nb = int(case.num_blocks_per_query()[token])
        count = min(nb, case.topk)
        ids[head, token, :count] = random.permutation(nb)[:count]
    verdict = explained(dataclasses.replace(case, engine=dataclasses.replace(case.engine, block_ids=ids)))
    assert verdict.causes == ()


@pytest.mark.parametrize("local_blocks", [0, 1])
@pytest.mark.parametrize("record", ALL)
def test_rows_read_from_outside_the_file_name_no_stride(record: str, local_blocks: int) -> None:
    """Only request 1 is wrong: a stride that reads it past the table agrees with anything but sentinels."""
    case = Engine(engine_case([(1700, 12), (1500, 12)], local_blocks=local_blocks)).run()
    assert case.engine is not None
    assert case.engine.scores is not None
    assert case.engine.block_ids is not None
    scores, ids = case.engine.scores.copy(), case.engine.block_ids.copy()
    random = np.random.default_rng(3)
    for head, token in np.ndindex(2, 12):
        blocks = int(case.num_blocks_per_query()[12 + token])
        scores[head, 12 + token, : blocks - local_blocks] = random.normal(size=blocks - local_blocks)
        ids[head, 12 + token] = random.permutation(blocks)[: case.topk]
    engine = dataclasses.replace(case.engine, scores=scores, block_ids=ids)
    verdict = explained(only(dataclasses.replace(case, engine=engine), record))
    assert verdict.fault_rows > 0
    assert "block-table stride" not in [cause.family for cause in (*verdict.causes, *verdict.candidates)]


@pytest.mark.parametrize(
    ("key", "forced"),
    [
        ("Equal", "4 init blocks are forced, not 0"),
        ("EqualFromTheEnd", "4 local blocks are forced, not 0"),
    ],
)
def test_forced_blocks_that_fill_every_place_are_not_told_from_equal_scores(key: str, forced: str) -> None:
    """By ids alone; no number of forced blocks is named as if it were certain."""
    verdict = explained(only(planted(key), ONLY_IDS))
    assert {cause.name for cause in verdict.causes} == {FAULTS[key].name, forced}


# Faults of a part of a call: what may be said of one, and what may not.

LENGTHS = [(1700, 30), (900, 1), (1500, 20)]


def graded(rows: list[tuple[int, int]]) -> NDArray[np.int8]:
    """Grades of two heads and 51 tokens, faulty at ``(head, token)``."""
    grades = np.full((2, 51), RIGHT, dtype=np.int8)
    for head, token in rows:
        grades[head, token] = FAULT
    return grades


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([(1, 5), (1, 30), (1, 31), (1, 40)], ["in head 1"]),
        ([(0, 2), (1, 5), (0, 9), (1, 29)], ["in request 0", "from position 1,672 on"]),
        ([(0, 2), (1, 32), (0, 30), (1, 29)], []),
        ([(1, 5), (1, 6), (1, 7)], []),
    ],
)
def test_parts_hold_all_faulty_rows_and_not_all_rows(rows: list[tuple[int, int]], parts: list[str]) -> None:
    """The lowest position of the call, 899, is no bound of a part: nothing is outside."""
    found = list(parts_at_fault(engine_case(LENGTHS), graded(rows)))
    assert [words for words, _ in found] == parts
    for _, part in found:
        assert all(part[row] for row in rows)


@pytest.mark.parametrize("record", ALL)
@pytest.mark.parametrize("where", ["head", "request", "late"])
def test_noise_in_a_part_has_no_cause(where: str, record: str) -> None:
    part = {"head": np.s_[1:, :], "request": np.s_[:, 30:], "late": np.s_[:, 15:30]}[where]

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        scores[part] += random.normal(size=scores[part].shape) * 20
        right = ids.copy()
        reselect(scores, ids)
        wrong = ids[part].copy()
        ids[:] = right
        ids[part] = wrong

    verdict = explained(changed(change, record))
    assert verdict.fault_rows > 20
    assert verdict.causes == ()


def test_a_person_is_told_which_part() -> None:
    verdict = explained(planted("InOneHead"))
    out = io.StringIO()
    print_engine(Console(file=out, width=400), "case", verdict)
    for told in (out.getvalue(), engine_section(verdict)):
        assert "nibbles are swapped, only in head 1" in told
        assert "all in head 1: no other row of the call is faulty." in told
