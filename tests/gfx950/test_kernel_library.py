"""The kernel library on the simulated device: the bytes of FlyDSL's own launcher, and failures by name."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from kernel import operators
from kernel.backends import flydsl, registry
from kernel.backends.flydsl import geometry, kernel_library
from kernel.backends.flydsl.backend import FlydslBackend
from kernel.backends.flydsl.geometry import VARIANTS, KeyType
from kernel.backends.flydsl.kernel_library import FILE_NAME, VARIABLE, export_library
from kernel.backends.flydsl.launch import DecodeLauncher
from kernel.backends.reference import ReferenceBackend
from kernel.contract import SUPPORTED_HEADS
from kernel.errors import DeviceUnavailableError, InvalidArgumentError, LaunchError
from kernel.gfx950.hip import SimulatedDevice, simulated_device
from tests.gfx950 import compiled, scorers
from tests.support.calls import Call, random_call
from tests.support.compare import assert_same_bits, without_decode
from tests.support.process import printed_by
from tests.support.score_program import SCORE

MIXED = ((300, 45), (129, 1), (1, 1), (385, 2))
"""Prefill and decode in a batch."""


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled.library()


@pytest.fixture(autouse=True)
def backends_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators keep their backends: those that read a library here are not for other tests."""
    monkeypatch.setattr(operators, "_BACKENDS", {})


@pytest.fixture
def device(library: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """The simulated device, the library chosen."""
    monkeypatch.setenv(VARIABLE, str(library))
    return simulated_device()


def backend() -> FlydslBackend:
    return FlydslBackend("flydsl-sim", simulated_device(), "exact")


@pytest.fixture
def both(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[FlydslBackend], torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """What an operation gives through the library and through FlyDSL's launcher, with as many launches."""

    def run(operation: Callable[[FlydslBackend], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        results, kernels = [], []
        for through_library in (True, False):
            if not through_library:
                monkeypatch.delenv(VARIABLE)
            one = backend()
            device.launches.clear()
            results.append(operation(one))
            kernels.append([(record.kernel, record.grid, record.image) for record in device.launches])
        assert kernels[0]
        assert kernels[0] == kernels[1]
        return results[0], results[1]

    return run


Both = Callable[[Callable[[FlydslBackend], torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


def scores_of(one: FlydslBackend | ReferenceBackend, call: Call, *, decode: bool = False) -> torch.Tensor:
    batch = call.batch()
    scores = torch.full((call.num_heads, call.total_q, batch.num_score_blocks), float("nan"))
    with nullcontext() if decode else without_decode(one):
        one.score(batch, scores)
    return scores


@pytest.mark.parametrize("decode", [False, True])
def test_scores(both: Both, decode: bool) -> None:
    """Without decode everything goes to the prefill kernel, with it few rows to the other."""
    call = random_call(MIXED, 4, seed=3).forcing(1, 1)
    found, compiled = both(lambda one: scores_of(one, call, decode=decode))
    assert_same_bits(found, compiled)
    assert_same_bits(found, scores_of(ReferenceBackend(), call))


def test_topk_with_ties(both: Both) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(-9, 9, (4, 7, 40), generator=generator).float()
    num_blocks = torch.tensor([0, 1, 15, 16, 17, 39, 40], dtype=torch.int32)

    def select(one: FlydslBackend | ReferenceBackend) -> torch.Tensor:
        ids = torch.full((4, 7, 16), -7, dtype=torch.int32)
        one.topk(scores, num_blocks, ids, "block")
        return ids

    found, compiled = both(select)
    assert_same_bits(found, compiled)
    assert_same_bits(found, select(ReferenceBackend()))


def test_select_through_group_maxima(both: Both) -> None:
    """34 blocks and k = 1: the scorers write maxima, and top-k reads those."""
    call = random_call(((34 * 128 - 5, 3), (4200, 1)), 4, seed=8, padding_columns=0)

    def select(one: FlydslBackend | ReferenceBackend) -> torch.Tensor:
        ids = torch.full((4, 4, 1), -7, dtype=torch.int32)
        one.select(call.batch(), ids, "score")
        return ids

    found, compiled = both(select)
    assert_same_bits(found, compiled)
    assert_same_bits(found, select(ReferenceBackend()))


def test_insert(both: Both) -> None:
    keys = torch.randn(67, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    slots = torch.randperm(3 * 128, generator=torch.Generator().manual_seed(2))[:67]
    slots[::9] = -1

    def insert(one: FlydslBackend | ReferenceBackend) -> torch.Tensor:
        pages = torch.full((3, 9216), 0xA5, dtype=torch.uint8)
        one.insert(keys, pages, slots)
        return pages

    found, compiled = both(insert)
    assert_same_bits(found, compiled)
    assert_same_bits(found, insert(ReferenceBackend()))


def test_a_process_that_has_no_flydsl(library: Path) -> None:
    """Append, score, decode, select where importing FlyDSL, or even looking for it, raises."""
    program = f"import tests.support.without_flydsl\n{SCORE}"
    assert printed_by("-c", program, **{VARIABLE: str(library)}) == "[]\n"


def test_a_kernel_that_is_not_in_the_library(device: SimulatedDevice, library: Path) -> None:
    call = random_call([(150, 3)], 2)
    with pytest.raises(DeviceUnavailableError, match=f"{library}: .* it holds no score_prefill_h2; make it"):
        scores_of(backend(), call)
    staged = DecodeLauncher(device, "staged")
    with pytest.raises(DeviceUnavailableError, match="it holds no score_decode_h4_staged"):
        scorers.decode(random_call([(150, 1)], 4).batch(), torch.zeros(4, 1, 5), launcher=staged)


def edited(library: bytes, **fields: object) -> bytes:
    """A library whose manifest says something else, sealed anew."""
    end = len(library) - len(kernel_library.MAGIC) - 8
    start = end - 32 - int.from_bytes(library[end : end + 8], "little")
    text = json.dumps(json.loads(library[start : end - 32]) | fields).encode()
    digest = hashlib.sha256(library[:start] + text).digest()
    return library[:start] + text + digest + len(text).to_bytes(8, "little") + kernel_library.MAGIC


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: None, "No such file or directory"),
        (lambda _: b"", "it does not end with a manifest"),
        (lambda _: b"\x7fELF" + bytes(10_000), "it does not end with a manifest"),
        (lambda image: image[: len(image) // 2], "it does not end with a manifest"),
        (lambda image: image[-10_000:], "its bytes are not those that were linked"),
        (lambda image: image[:5000] + b"garbled" + image[5007:], "its bytes are not those that were linked"),
        (lambda image: image[-len(kernel_library.MAGIC) - 8 :], "its manifest is garbled"),
        (
            lambda image: image.replace(b'{"kernels"', b'{{kernels"'),
            "its bytes are not those that were linked",
        ),
        (
            lambda image: image.replace(b'"insert_bf16": 9', b'"insert_bf16": 8'),
            "its bytes are not those that were linked",
        ),
        (lambda image: edited(image, unknown="1"), "its manifest is garbled: it has other fields"),
        (lambda image: edited(image, kernels=None), "its manifest is garbled: kernels is no dict"),
        (lambda image: edited(image, kernels={"a": True}), "its manifest is garbled: a takes True arguments"),
        (lambda image: edited(image, kernels={"a": "9"}), "its manifest is garbled: a takes '9' arguments"),
        (lambda image: edited(image, sources=7), "its manifest is garbled: sources is no str"),
        (lambda image: edited(image, partial=1), "its manifest is garbled: partial is no bool"),
        (
            lambda image: edited(image, partial=False),
            "it holds no score_prefill_h1, score_prefill_h2, score_d",
        ),
        (lambda image: edited(image, target="gfx942"), "its kernels are for gfx942, not gfx950"),
        (lambda image: edited(image, sources="0" * 64), "it was made from other kernel sources"),
    ],
)
def test_an_unfit_library_is_refused_by_name(
    change: Callable[[bytes], bytes | None],
    reason: str,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the backend is made and in what ``doctor`` says, before anything of it is mapped."""
    unfit = tmp_path / "kernels.so"
    changed = change(library.read_bytes())
    if changed is not None:
        unfit.write_bytes(changed)
    monkeypatch.setenv(VARIABLE, str(unfit))
    message = f"{VARIABLE}={unfit}: the kernel library cannot be used: {reason}"
    status = registry.status("flydsl-sim")
    assert (status.usable, status.reason.startswith(message)) == (False, True), status.reason
    assert "`nvfp4-indexer kernel export`" in status.reason
    with pytest.raises(DeviceUnavailableError) as caught:
        flydsl.create_simulated(None, "exact")
    assert str(caught.value) == status.reason


def test_a_folder_for_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(DeviceUnavailableError, match="cannot be used: Is a directory"):
        flydsl.create_simulated(None, "exact")


def test_a_library_that_does_not_link_to_hip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well sealed, and no ELF image: the loader's words, and what to install."""
    unfit = tmp_path / "kernels.so"
    unfit.write_bytes(kernel_library.sealed(b"not an image", {}, partial=True))
    monkeypatch.setenv(VARIABLE, str(unfit))
    with pytest.raises(DeviceUnavailableError, match=r"does not load: .*kernels.so.*install ROCm 7"):
        flydsl.create_simulated(None, "exact")


def test_a_device_of_another_architecture_is_refused(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own name, before the library, fit as it is, is loaded there."""
    found = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for name, value in (("is_available", True), ("current_device", 0), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    status = registry.status("flydsl")
    assert not status.usable
    assert status.reason == (
        "cuda:0 is a gfx942, and the kernels are for gfx950 (MI350X, MI355X); use another backend"
    )


def test_the_registry_says_which_library(device: SimulatedDevice, library: Path) -> None:
    status = registry.status("flydsl-sim")
    assert status.usable
    assert f"kernel library {library}" in status.reason


def scorer_with_keys() -> tuple[IndexScorer, int, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    scorer = IndexScorer(
        IndexerConfig(num_index_heads=4, num_pages=3, local_blocks=0, backend="flydsl-sim", device="cpu")
    )
    sequence = scorer.add_sequence()
    scorer.append_keys(sequence, torch.randn(300, 128, generator=generator).to(torch.bfloat16))
    return scorer, sequence, torch.randn(20, 4, 128, generator=generator)


@pytest.mark.parametrize("call", ["hipModuleLoadData", "hipGetDevice"])
def test_a_module_that_does_not_load_is_tried_again(device: SimulatedDevice, call: str) -> None:
    """By FlyDSL's own launcher it would stay failed until the process ends."""
    scorer, sequence, q = scorer_with_keys()
    for name in compiled.KERNELS:
        loaded = kernel_library.load(Path(os.environ[VARIABLE]), device)._loaded
        assert getattr(loaded, f"{name}__module_unload")() in (0, -1)
    device.launches.clear()
    for _ in range(2):
        with (
            pytest.raises(
                LaunchError, match=rf"hipErrorOutOfMemory.*did not load: {call} returned"
            ) as caught,
            device.failing(call, 2),
        ):
            scorer.score(q, [sequence])
        assert caught.value.code == 2
        assert "the next launch loads it again" in str(caught.value)
    assert not device.launches
    again, other, _ = scorer_with_keys()
    assert_same_bits(scorer.score(q, [sequence]).block_ids, again.score(q, [other]).block_ids)


def test_a_failing_launch_leaves_the_scorer_as_it_was(device: SimulatedDevice) -> None:
    scorer, sequence, q = scorer_with_keys()
    before = scorer.score(q, [sequence])
    with (
        pytest.raises(LaunchError, match="hipModuleLaunchKernel returned hipErrorLaunchFailure") as caught,
        device.failing("hipModuleLaunchKernel"),
    ):
        scorer.score(q, [sequence])
    assert caught.value.code == 719
    after = scorer.score(q, [sequence])
    assert before.scores is not None
    assert after.scores is not None
    assert_same_bits(after.scores, before.scores)
    assert_same_bits(after.block_ids, before.block_ids)


def test_a_module_is_loaded_once(device: SimulatedDevice) -> None:
    """By however many scorers of a device."""
    call = random_call([(150, 3)], 4)
    scores_of(backend(), call)
    before = device.calls()["hipModuleLoadData"]
    for _ in range(2):
        one = backend()
        scores_of(one, call)
        scores_of(one, call)
    assert device.calls()["hipModuleLoadData"] == before


def test_a_first_launch_in_a_capture_is_refused(device: SimulatedDevice) -> None:
    """By name; the library's module is not loaded, and is at the next launch."""
    call = random_call([(150, 3)], 4)
    scorer, before = backend(), device.calls().get("hipModuleLoadData")
    with (
        device.capturing(),
        pytest.raises(LaunchError, match="first launch of score_prefill_h4 loads its module"),
    ):
        scores_of(scorer, call)
    assert device.calls().get("hipModuleLoadData") == before
    assert_same_bits(scores_of(scorer, call), scores_of(ReferenceBackend(), call))


def test_an_access_out_of_bounds_is_an_error(device: SimulatedDevice) -> None:
    """The kernel's own fault is the cause, as through FlyDSL's launcher."""
    call = random_call([(150, 3)], 4)
    batch = call.batch()
    scores = torch.full((4, 3, batch.num_score_blocks), float("nan"))
    tensors = [batch.q, batch.pages, batch.lut, scores]
    one = backend()._prefill._kernels
    with pytest.raises(LaunchError, match="hipErrorIllegalAddress") as caught:
        one.launch(
            4, tensors, *[tensor.data_ptr() for tensor in tensors[:2]], 9216, *[1 << 20] * 9, 1, 1, 0, 0, 1
        )
    assert caught.value.__cause__ is not None


@pytest.mark.nightly
def test_the_command_exports_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it exported scores, for every number of heads."""
    words = ("kernel", "export", "--json", "--out", tmp_path / "new")
    result = json.loads(printed_by("-m", "client.cli", *words))
    assert result["library"] == str(tmp_path / "new" / kernel_library.FILE_NAME)
    assert len(result["kernels"]) == 3 * len(SUPPORTED_HEADS) + len(VARIANTS) + len(KeyType)
    assert tuple(result["kernels"]) == geometry.kernel_names()
    assert set(kernel_library.check(Path(result["library"])).kernels) == set(result["kernels"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == [kernel_library.FILE_NAME]
    monkeypatch.setenv(VARIABLE, result["library"])
    for heads in SUPPORTED_HEADS:
        call = random_call(MIXED, heads, seed=heads)
        for decode in (False, True):
            assert_same_bits(scores_of(backend(), call, decode=decode), scores_of(ReferenceBackend(), call))


# ---- Making the kernel library where something is wrong: named, and a library that is there stays ----


@pytest.mark.parametrize("kernels", [("score_prefill_h4", "score_prefil_h2"), ()])
def test_a_kernel_that_there_is_not(kernels: tuple[str, ...], tmp_path: Path) -> None:
    named = "'score_prefil_h2'" if kernels else "none"
    with pytest.raises(InvalidArgumentError, match=f"^kernels = {named}: must be some of") as caught:
        export_library(tmp_path / "new", kernels)
    assert set(geometry.kernel_names()) <= set(caught.value.limit.replace(",", "").split())
    assert not (tmp_path / "new").exists()


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("flydsl", "ziglang") else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceUnavailableError) as caught:
        export_library(tmp_path / "new")
    for part in (
        "the package flydsl is not installed",
        "no C compiler (cc, gcc, clang) is on the path",
        "FlyDSL's export needs ld.lld or ld and llvm-objcopy or objcopy on the path",
    ):
        assert part in caught.value.reason
    for part in (
        "pip install flydsl==0.5.0",
        "install gcc or clang",
        "install binutils, or put ROCm's llvm/bin",
    ):
        assert part in caught.value.remedy
    assert not (tmp_path / "new").exists()


def test_one_tool_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cc", "ld"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceUnavailableError) as caught:
        kernel_library.check_export()
    assert "needs llvm-objcopy or objcopy on the path" in caught.value.reason
    assert "C compiler" not in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DeviceUnavailableError, match=r"cannot be made in .*Not a directory.*; name a folder"):
        export_library(file / "under")


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A limit of a file's size stands for the disk's."""
    library = tmp_path / FILE_NAME
    library.write_bytes(b"an older library")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, limits[1]))
    try:
        with pytest.raises(DeviceUnavailableError, match="FlyDSL cannot export insert_bf16") as caught:
            export_library(tmp_path, ["insert_bf16"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"see that {tmp_path} and " in str(caught.value)
    assert library.read_bytes() == b"an older library"
    assert list(tmp_path.iterdir()) == [library]


def test_a_compiler_that_fails_to_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / FILE_NAME
    library.write_bytes(b"an older library")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(DeviceUnavailableError, match=r"^false -shared \.\.\. failed: exit code 1; set CC to"):
        export_library(tmp_path, ["insert_bf16"])
    assert library.read_bytes() == b"an older library"
    assert list(tmp_path.iterdir()) == [library]


def test_a_library_that_is_in_use_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps what it loaded, and refuses the new one: the dynamic loader would mix the two up."""
    path = tmp_path / FILE_NAME
    shutil.copy(compiled.library(), path)
    monkeypatch.setenv(VARIABLE, str(path))
    backend = FlydslBackend("flydsl-sim", simulated_device(), "exact")
    assert export_library(tmp_path, ["insert_fp16"]) == (path, ["insert_fp16"])
    assert list(tmp_path.iterdir()) == [path]
    keys = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found, expected = torch.zeros(2, 1, 9216, dtype=torch.uint8)
    for one, pages in ((backend, found), (ReferenceBackend(), expected)):
        one.insert(keys, pages, torch.arange(9))
    assert_same_bits(found, expected)
    with pytest.raises(DeviceUnavailableError, match=f"{path} was replaced after .*; start a new process"):
        FlydslBackend("flydsl-sim", simulated_device(), "exact")
    assert list(kernel_library.check(path).kernels) == ["insert_fp16"]
