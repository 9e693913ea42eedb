"""The compiled prefill scorers must not get worse, and the report on them is of what runs.

Compiled once in a session, without a GPU; every clock is a prediction.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from client.commands.kernel import HONESTY
from kernel.backends.flydsl import geometry, toolchain
from kernel.backends.flydsl.geometry import LAYOUTS, VARIANTS, KeyType, Layout, Variant
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import RunReport
from kernel.gfx950.hip import simulated_device
from kernel.gfx950.report import decode, prefill, work
from kernel.gfx950.report.decode import (
    DECODE_ROLES,
    MEMORY_PAGE_CLOCKS,
    DecodeReport,
    check_decode_targets,
    find_trips,
)
from kernel.gfx950.report.prefill import ROLES, KernelReport, UnknownLoopsError, check_targets
from kernel.gfx950.report.work import WorkReport, check_work_targets
from tests.gfx950 import compiled
from tests.gfx950.compiled import LIMITS, assert_every_limit_bites, worse
from tests.gfx950.one_wave import kernel_of
from tests.gfx950.scorers import HEADS, scored
from tests.support.calls import random_call
from tests.support.process import call

KERNEL_KEYS = {
    "name", "heads", "vgpr", "agpr", "sgpr", "vgpr_spills", "sgpr_spills", "scratch_bytes", "lds_bytes",
    "waves_per_simd", "loops",
}  # fmt: skip
LOOP_KEYS = {
    "role", "blocks", "instructions", "mfma", "valu", "lds_read", "lds_write", "waits", "nops",
    "model_clocks", "bound", "mfma_share", "predicted_utilisation",
}  # fmt: skip


@pytest.fixture(params=HEADS)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return compiled.report(request.param).fields()


def test_no_figure_is_worse_than_its_limit(fields: dict[str, Any]) -> None:
    assert worse(fields) == []


def test_the_gate_sees_every_figure_get_worse() -> None:
    fields = compiled.report(4).fields()
    assert set(LIMITS[fields["name"]]["loops"]) == set(ROLES)
    assert_every_limit_bites(fields, at_least=61)


@pytest.mark.nightly
def test_the_gate_stops_a_kernel_that_got_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A max without the flags that spare its operands a canonicalisation each."""
    from flydsl._mlir.dialects import arith

    from kernel.backends.flydsl import ops

    monkeypatch.setattr(ops, "max_f32", arith.maxnumf)
    name = geometry.prefill_name(4)
    found = worse(prefill.report_kernel(toolchain.assembly(name), name, 4).fields())
    assert any(line.startswith("unmasked: valu") for line in found)
    assert any(line.startswith("diagonal: valu") for line in found)


@pytest.mark.parametrize("heads", HEADS)
def test_the_report_is_of_the_kernel_that_is_launched(heads: int) -> None:
    """The compiler's text and metadata against the code object of a launch, disassembled.

    The order may differ in places: LLVM moves a few independent instructions from process to process.
    """
    name = geometry.prefill_name(heads)
    reported = compiled.kernel(name)
    scored(random_call([(5, 2)], heads))
    launched = simulated_device().launches[-1].report.kernel
    assert launched.name == name
    counts = [Counter(f"{i.mnemonic} {i.encoding}" for i in k.instructions) for k in (reported, launched)]
    assert counts[0] == counts[1]
    assert reported.metadata is not None
    assert launched.metadata is not None
    assert reported.metadata.notes == launched.metadata.notes
    assert reported.metadata.lds_bytes == launched.metadata.lds_bytes


def test_targets_are_met(fields: dict[str, Any]) -> None:
    """All but the utilisation of a diagonal block, which then says why."""
    report = compiled.report(fields["heads"])
    for target in check_targets(report):
        if target.name.startswith("diagonal: MFMA utilisation") and not target.met:
            assert "vector issue" in target.reason
        else:
            assert target.met, target


def test_fields_agree_with_each_other(fields: dict[str, Any]) -> None:
    assert fields.keys() >= KERNEL_KEYS
    assert [loop["role"] for loop in fields["loops"]] == list(ROLES)
    assert json.loads(json.dumps(fields)) == fields
    for loop in fields["loops"]:
        assert loop.keys() >= LOOP_KEYS
        clocks = loop["model_clocks"]
        assert clocks["mfma"] == 32 * loop["mfma"]
        assert clocks["valu"] == 4 * loop["valu"]
        assert clocks[loop["bound"]] == max(clocks.values())
        assert loop["mfma_share"] == round(clocks["mfma"] / max(clocks.values()), 4)
        assert loop["blocks"] == loop["barriers"]
        assert 0 <= loop["predicted_utilisation_lowest"] <= loop["predicted_utilisation"]
        assert loop["predicted_utilisation"] <= loop["predicted_utilisation_highest"] <= 1
        assert loop["predicted_clocks"] >= 2 * max(clocks.values()) - 1 or loop["bound"] != "mfma"
        classes = ("mfma", "valu", "salu", "branches", "lds_read", "lds_write", "memory_loads")
        more = ("memory_stores", "scalar_loads", "waits", "barriers", "nops")
        assert sum(loop[name] for name in classes + more) == loop["instructions"]
    by_role = {loop["role"]: loop for loop in fields["loops"]}
    assert by_role["unmasked"]["mfma"] == 4 * by_role["whole"]["mfma"] == 256
    assert by_role["later"]["mfma"] == 0


def test_every_dependence_has_its_wait_states(fields: dict[str, Any]) -> None:
    assert [hazard for hazard in fields["hazards"] if not hazard["ok"]] == []
    seen = {hazard["kind"] for hazard in fields["hazards"] if hazard["seen"] is not None}
    assert "matrix result read by a vector or memory instruction" in seen


def test_keys_lie_in_lds_without_bank_conflicts(fields: dict[str, Any]) -> None:
    """Writing and reading a block's keys; the look-ups go where the scale bytes send them."""
    wide = {part["mnemonic"]: part["extra_passes"] for part in fields["interpreted"]["lds"]}
    assert wide["ds_read_b128"] == 0
    assert wide["ds_write_b128"] == 0


@pytest.fixture(params=["one of each family", pytest.param("every kernel", marks=pytest.mark.nightly)])
def reported_before(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, KernelReport | DecodeReport | WorkReport]:
    """By name what the command finds: reports of this session, renamed where one stands for its family."""
    every = request.param == "every kernel"
    reports: dict[str, KernelReport | DecodeReport | WorkReport] = {}
    for heads in SUPPORTED_HEADS:
        name = geometry.prefill_name(heads)
        reports[name] = replace(compiled.report(heads if every else 4), name=name, heads=heads)
    for layout, heads in itertools.product(LAYOUTS, SUPPORTED_HEADS):
        name = geometry.decode_name(heads, layout)
        decoder = compiled.decode_report(*((heads, layout) if every else (4, "registers")))
        reports[name] = replace(decoder, name=name, heads=heads, layout=layout)
    for variant in VARIANTS:
        found = compiled.work_report(variant if every else Variant(16))
        reports[variant.name] = replace(found, name=variant.name)
    for key_type in KeyType:
        name = geometry.insert_name(key_type)
        reports[name] = replace(compiled.work_report(key_type if every else KeyType.BFLOAT16), name=name)
    monkeypatch.setattr(toolchain, "assembly", lambda name: name)
    for module, function in ((prefill, "report_kernel"), (decode, "report_decode")):
        monkeypatch.setattr(module, function, lambda name, *_: reports[name])
    for function in ("report_topk", "report_insert"):
        monkeypatch.setattr(work, function, lambda name, *_: reports[name])
    return reports


def test_the_command_prints_the_fields(
    reported_before: dict[str, KernelReport | DecodeReport | WorkReport],
) -> None:
    done = call("kernel", "report", "--json")
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["note"] == HONESTY
    assert [kernel["name"] for kernel in printed["kernels"]] == list(geometry.kernel_names())
    for kernel in printed["kernels"]:
        assert all(target["wanted"] for target in kernel.pop("targets"))
        assert kernel == reported_before[kernel["name"]].fields()


@pytest.mark.usefixtures("reported_before")
def test_the_command_is_legible_at_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = call("kernel", "report")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 110
    tables = [line for line in done.stdout.splitlines() if line.split()[:1] == ["unmasked"]]
    assert len(tables) == 2 * len(SUPPORTED_HEADS)
    for name in geometry.kernel_names():
        assert len(re.findall(rf"^{name}( |$)", done.stdout, re.MULTILINE)) == 1
    assert "…" not in done.stdout
    assert " ".join(done.stdout.split()).endswith(HONESTY)
    assert done.stdout.count("predictions") >= len(SUPPORTED_HEADS)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_in_one_line_what_is_missing(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYDSL_GPU_ARCH", "gfx942")
    done = call("kernel", "report", *(["--json"] if as_json else []))
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "FLYDSL_GPU_ARCH=gfx942" in done.stderr
    assert not as_json or json.loads(done.stderr)["error"] == "DeviceUnavailableError"


# ---- The decode scorers ----


@pytest.fixture(
    params=[
        pytest.param(
            (layout, heads), marks=() if (layout, heads) == ("registers", 4) else pytest.mark.nightly
        )
        for layout, heads in itertools.product(LAYOUTS, SUPPORTED_HEADS)
    ]
)
def report(request: pytest.FixtureRequest) -> DecodeReport:
    layout, heads = request.param
    return compiled.decode_report(heads, layout)


def test_no_figure_of_decode_is_worse_than_its_limit(report: DecodeReport) -> None:
    assert worse(report.fields()) == []


def test_every_kernel_has_limits() -> None:
    assert list(LIMITS) == list(geometry.kernel_names())


@pytest.mark.parametrize("layout", ["registers", pytest.param("staged", marks=pytest.mark.nightly)])
def test_the_gate_sees_every_figure_of_decode_get_worse(layout: Layout) -> None:
    fields = compiled.decode_report(4, layout).fields()
    assert set(LIMITS[fields["name"]]["loops"]) == set(DECODE_ROLES)
    assert_every_limit_bites(fields, at_least=33)


def test_decode_meets_its_targets(report: DecodeReport) -> None:
    """No spill, two waves a SIMD, a page in less than half of what the memory takes for it."""
    targets = check_decode_targets(report)
    assert [target for target in targets if not target.met] == []
    assert any("memory" in target.name for target in targets)


def test_fields_of_decode_agree_with_each_other(report: DecodeReport) -> None:
    fields = report.fields()
    assert json.loads(json.dumps(fields)) == fields
    page, group, forced = fields["loops"]
    assert [loop["role"] for loop in fields["loops"]] == list(DECODE_ROLES)
    assert page["mfma"] == group["mfma"] == forced["mfma"] == 32
    assert page["memory_loads"] == {"registers": 40, "staged": 36}[report.layout]
    assert (page["memory_stores"], group["memory_stores"]) == (1, 2)
    assert page["valu"] < group["valu"]
    assert (page["interpreted_trips"], group["interpreted_trips"], forced["interpreted_trips"]) == (27, 8, 1)
    assert fields["page"]["valu"] == round((3 * page["valu"] + group["valu"]) / 16, 2)
    assert fields["page"]["memory_clocks"] == pytest.approx(707.8, abs=0.1)
    assert pytest.approx(9216 / 8e12 * 256 * 2.4e9) == MEMORY_PAGE_CLOCKS
    # Staged, a page of 9,216 B is written into LDS and read from it, at 128 B a clock.
    written, read = {"registers": (0, 0), "staged": (72, 72)}[report.layout]
    assert fields["page"]["lds_dma_clocks"] == written
    assert fields["page"]["model_clocks"]["lds"] == 64 + read
    assert fields["page"]["lds_conflict_clocks"] > 0
    assert all(hazard["ok"] for hazard in fields["hazards"])
    memory_bound = 32 * 1024 * 9216 / 8e6
    assert fields["calls"][0]["predicted_us"] == pytest.approx(memory_bound + 2.5, abs=0.1)


def test_another_number_of_trips_is_an_error() -> None:
    body = "s_nop 0\n.LBB0_1:\n" + 32 * "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0\n"
    kernel = kernel_of(body + "s_cbranch_scc1 .LBB0_1\ns_endpgm")
    trace = np.array([0, *range(1, 34), 34], np.int32)
    counts = np.zeros(len(kernel.instructions), np.int64)
    with pytest.raises(UnknownLoopsError, match="wave 0 made 1 trips, not 8"):
        find_trips(RunReport(kernel, counts, 1, 1, None, {(0, 0): trace}))


# ---- Top-k and insert ----

KERNELS: tuple[Variant | KeyType, ...] = (*VARIANTS, *KeyType)
ON_EVERY_COMMIT = (Variant(16), Variant(16, 64), KeyType.BFLOAT16)


@pytest.fixture(
    params=[
        pytest.param(one, marks=() if one in ON_EVERY_COMMIT else pytest.mark.nightly, id=one.name.lower())
        for one in KERNELS
    ]
)
def work_figures(request: pytest.FixtureRequest) -> WorkReport:
    return compiled.work_report(request.param)


def test_no_figure_of_topk_and_insert_is_worse_than_its_limit(work_figures: WorkReport) -> None:
    assert worse(work_figures.fields()) == []


def test_the_gate_sees_every_figure_of_insert_get_worse() -> None:
    assert_every_limit_bites(compiled.work_report(KeyType.BFLOAT16).fields(), at_least=11)


def test_topk_and_insert_meet_their_targets(work_figures: WorkReport) -> None:
    """No spill; top-k through maxima in 15 us, from scores and insert within 1.2 of their bytes' time."""
    targets = check_work_targets(work_figures)
    assert [target for target in targets if not target.met] == []
    assert len(targets) == 3 or work_figures.name.startswith("topk")


def test_fields_of_topk_and_insert_agree_with_each_other(work_figures: WorkReport) -> None:
    fields = work_figures.fields()
    assert json.loads(json.dumps(fields)) == fields
    for one in fields["works"]:
        assert one["predicted_us"] == max(one["predicted_valu_us"], one["predicted_memory_us"])
        clocks = 2400 * 1024 * one["predicted_valu_us"]
        assert clocks == pytest.approx(4 * one["valu"] * one["units"], rel=0.01)
        assert one["predicted_memory_us"] == pytest.approx(one["bytes"] * one["units"] / 8e6, rel=0.01)
