"""Every kernel against the oracle."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from client.rocprof import read_rocprof, rocprof_commands
from indexer.case import Case, write_case
from indexer.made_cases import KINDS, Shape, make_case
from indexer.replay import load_case
from indexer.verify import verify_case
from kernel.backends.base import Order
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.backend import FlydslBackend
from kernel.backends.flydsl.geometry import VARIANTS, Variant, variant_for
from kernel.backends.flydsl.launch import MAX_ROWS, TopkLauncher
from kernel.backends.flydsl.runtime import Device
from kernel.backends.reference import ReferenceBackend
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES, SUPPORTED_HEADS
from kernel.plan import MAXIMA_BLOCKS

# One item of a part: what it found, or the error that it ended with.

Item = dict[str, Any]
"""JSON fields, ``name`` and ``ok`` among them."""


def attempt(name: str, run: Callable[[], Item]) -> Item:
    """Run an item; an error becomes its result, so that the items after it run.

    Args:
        name: of the item.
        run: gives its fields, ``ok`` where it can be false.
    """
    try:
        return {"name": name, "ok": True, **run()}
    except Exception as error:
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}


# Where a part runs and how large its calls are.

BACKENDS = ("flydsl", "flydsl-sim")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls.

    Attributes:
        context: keys of a checked case's request.
        queries: its query tokens.
        repeats: runs that are measured, after one that is not.
        prefill_heads: index heads of measured prefills.
        prefill_queries: their query tokens.
        prefill_contexts: their keys.
        decodes: requests, queries of each and keys of each, of measured decode steps.
        topk_blocks: columns of measured selections.
        inserts: keys of measured insertions.
    """

    context: int
    queries: int
    repeats: int
    prefill_heads: tuple[int, ...]
    prefill_queries: int
    prefill_contexts: tuple[int, ...]
    decodes: tuple[tuple[int, int, int], ...]
    topk_blocks: tuple[int, ...]
    inserts: tuple[int, ...]


M3 = Sizes(
    context=8192,
    queries=64,
    repeats=20,
    prefill_heads=(4, 1),
    prefill_queries=8192,
    prefill_contexts=(131_072, 524_288),
    decodes=(
        (32, 1, 131_072),
        (32, 4, 131_072),
        (1, 1, 524_288),
        (1, 4, 524_288),
        (1, 1, 131_072),
        (128, 1, 8192),
    ),
    topk_blocks=(1024, 2048, 4096, 8192),
    inserts=(65_536, 1_048_576),
)
"""The shapes of ``docs/gfx950.md``, and some around them."""
SIMULATED = Sizes(
    context=300,
    queries=5,
    repeats=1,
    prefill_heads=(1,),
    prefill_queries=3,
    prefill_contexts=(300,),
    decodes=((2, 1, 300),),
    topk_blocks=(20,),
    inserts=(40,),
)
"""So small that a CPU can interpret them."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        backend: one of :data:`BACKENDS`.
        folder: where files of its own go.
    """

    backend: str
    folder: Path

    @property
    def simulated(self) -> bool:
        """Whether no figure is a measurement of the kernels."""
        return self.backend == "flydsl-sim"

    @property
    def sizes(self) -> Sizes:
        """How large the calls are."""
        return SIMULATED if self.simulated else M3

    def device(self) -> Device:
        """Where launches go.

        Raises:
            DeviceUnavailableError: it is not there.
        """
        if self.simulated:
            from kernel.gfx950.hip import simulated_device

            return simulated_device()
        from kernel.backends.flydsl.runtime import RocmDevice

        return RocmDevice(torch.device("cuda"))

    def launchers(self) -> FlydslBackend:
        """The backend's operations.

        Raises:
            DeviceUnavailableError: what is missing.
        """
        return FlydslBackend(self.backend, self.device(), "exact")


ORDERS: tuple[Order, ...] = ("score", "block")
KEY_TYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_BLOCKS = 2 * MAXIMA_BLOCKS + 2
"""Blocks from which the best one is selected through group maxima."""
_ROWS = 7
_KEYS = 67


def cases(setting: Setting) -> Iterator[Item]:
    """Seeded cases through insert, the scorers of every number of heads, and top-k."""
    kinds = ("ragged",) if setting.simulated else tuple(KINDS)
    for kind in kinds:
        for heads in SUPPORTED_HEADS:
            shape = Shape(setting.sizes.context, setting.sizes.queries, heads)
            name = f"{kind}, {heads} heads, {shape.context} keys"
            yield attempt(name, partial(_verified, setting, kind, shape))


def decode(setting: Setting) -> Iterator[Item]:
    """Decode steps of every number of heads, the pages in either layout."""
    before = os.environ.get(geometry.VARIABLE)
    try:
        for layout in geometry.LAYOUTS:
            os.environ[geometry.VARIABLE] = layout  # as the person who takes the benchmark's answer does
            for heads in SUPPORTED_HEADS:
                shape = Shape(setting.sizes.context, MAX_ROWS // heads, heads, batch=2)
                yield attempt(f"{layout}, {heads} heads", partial(_verified, setting, "m3", shape))
    finally:
        os.environ.pop(geometry.VARIABLE)
        if before is not None:
            os.environ[geometry.VARIABLE] = before


def select(setting: Setting) -> Iterator[Item]:
    """Selection without scores, through group maxima, against the selection from scores."""
    for heads in SUPPORTED_HEADS:
        for queries in (1, MAX_ROWS // heads + 1):
            shape = Shape(GROUPED_BLOCKS * BLOCK_TOKENS, queries, heads, topk=1)
            name = f"{heads} heads, {queries} queries, {GROUPED_BLOCKS} blocks"
            yield attempt(name, partial(_same_selection, setting, shape))


def topk(setting: Setting) -> Iterator[Item]:
    """Every top-k kernel on tied scores, either order."""
    for variant in VARIANTS:
        for order in ORDERS:
            yield attempt(f"{variant.name}, order {order}", partial(_same_ids, setting, variant, order))


def insert(setting: Setting) -> Iterator[Item]:
    """Pages of each type of keys, byte for byte."""
    for dtype in KEY_TYPES:
        yield attempt(str(dtype).removeprefix("torch."), partial(_same_pages, setting, dtype))


def _verified(setting: Setting, kind: str, shape: Shape) -> Item:
    case = make_case(kind, shape)
    case = dataclasses.replace(case, local_blocks=0)  # forced, a last block would hide a fault in its mask
    fields = dataclasses.asdict(verify_case(case, kind, setting.backend))
    del fields["case"], fields["engine"]
    return fields


def _same_selection(setting: Setting, shape: Shape) -> Item:
    case: Case = dataclasses.replace(make_case("m3", shape), local_blocks=0)
    scorer = load_case(case, setting.backend)
    found, expected = scorer.score(return_scores=False), scorer.score()
    wrong = (found.block_ids != expected.block_ids).any(dim=2)
    return {"ok": not wrong.any().item(), "rows": wrong.numel(), "wrong_rows": int(wrong.sum())}


def _same_ids(setting: Setting, variant: Variant, order: Order) -> Item:
    device = setting.device()
    columns = _columns_of(variant)
    generator = torch.Generator().manual_seed(variant.best)
    scores = torch.randint(-9, 9, (2, _ROWS, columns), generator=generator, dtype=torch.float32, device="cpu")
    lengths = [0, 1, variant.best, variant.best + 1, columns // 2, columns - 1, columns]
    num_blocks = torch.tensor(lengths, dtype=torch.int32, device="cpu").clamp(max=columns)
    for row, length in enumerate(num_blocks.tolist()):
        scores[:, row, length:] = -torch.inf
    expected = torch.full((2, _ROWS, variant.best), -7, dtype=torch.int32, device="cpu")
    ReferenceBackend().topk(scores, num_blocks, expected, order)
    at = device.torch_device
    found = torch.full_like(expected, -7).to(at)
    maxima = None if variant.most_groups is None else group_maxima(scores).to(at)
    TopkLauncher(device)(scores.to(at), num_blocks.to(at), found, order, maxima)
    wrong = (found.cpu() != expected).any(dim=2)
    return {"ok": not wrong.any().item(), "rows": wrong.numel(), "wrong_rows": int(wrong.sum())}


def _columns_of(variant: Variant) -> int:
    """The shortest rows for which calls take the kernel, but no shorter than some groups and part of one."""
    longer = (one.most_groups * MAXIMA_BLOCKS + 1 for one in VARIANTS if one.most_groups)
    grouped = variant.most_groups is not None
    return min(
        columns
        for columns in (3 * MAXIMA_BLOCKS + 5, *longer)
        if variant_for(variant.best, columns, grouped) == variant
    )


def group_maxima(scores: torch.Tensor) -> torch.Tensor:
    """``[H, total_q, S]`` to ``[H, total_q, ceil(S / 16)]``."""
    missing = -scores.shape[2] % MAXIMA_BLOCKS
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return padded.view(*padded.shape[:2], -1, MAXIMA_BLOCKS).amax(dim=3)


def _same_pages(setting: Setting, dtype: torch.dtype) -> Item:
    launchers = setting.launchers()
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(_KEYS, HEAD_DIM, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    slots = torch.randperm(2 * BLOCK_TOKENS, generator=generator, dtype=torch.int64, device="cpu")[:_KEYS]
    slots[::9] = -1
    expected = torch.full((2, PAGE_BYTES), 0xA5, dtype=torch.uint8, device="cpu")
    found = expected.to(launchers.device, copy=True)
    ReferenceBackend().insert(keys, expected, slots)
    launchers.insert(keys.to(launchers.device), found, slots.to(launchers.device))
    wrong = int((found.cpu() != expected).sum())
    return {"ok": wrong == 0, "bytes": expected.numel(), "wrong_bytes": wrong}


# What rocprofv3 says about the kernels, where it is installed.

_TIMEOUT_S = 400
"""Of a command; four of them and their cases fit into the half hour of a part."""
_SHOWN_CHARS = 2000
"""Of what a failed command printed."""


def counters(setting: Setting) -> Iterator[Item]:
    """Traces and counters of a prefill and of a decode step, insert and top-k among them."""
    if shutil.which("rocprofv3") is None:
        again = ["nvfp4-indexer", "kernel", "first-run", "--out", str(setting.folder / "counters")]
        again += ["--backend", setting.backend, "--part", "counters"]
        remedy = f"rocprofv3 is not on the path: put ROCm's bin folder there, then run {shlex.join(again)}"
        yield {"name": "rocprofv3", "ok": None, "skipped": remedy}
        return
    if setting.simulated:
        shapes = {"prefill": Shape(300, 17, 1), "decode": Shape(300, 1, 1)}
    else:
        shapes = {"prefill": Shape(131_072, 8192), "decode": Shape(131_072, 1, batch=4)}
    for name, shape in shapes.items():
        folder = setting.folder / "rocprof" / name
        commands = _commands(setting, name, shape, folder)
        for what, command in zip(("trace", "counters"), commands):
            yield attempt(f"{name}, {what}", partial(_run, command))
        yield attempt(f"{name}, kernels", partial(_kernels, setting, folder))


def _commands(setting: Setting, name: str, shape: Shape, folder: Path) -> tuple[list[str], list[str]]:
    setting.folder.mkdir(parents=True, exist_ok=True)
    case = setting.folder / f"{name}.safetensors"
    write_case(make_case("m3", shape), case)
    profile = ["profile", str(case), "--backend", setting.backend, "--cache", "warm"]
    repeats = ["--repeats", str(min(setting.sizes.repeats, 5))]
    return rocprof_commands([sys.executable, "-m", "client.cli", *profile, *repeats], str(folder))


def _run(command: list[str]) -> Item:
    # A file, not a pipe: what a killed rocprofv3 leaves behind would hold a pipe open, beyond the limit.
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S)
        printed.seek(0)
        shown = printed.read()[-_SHOWN_CHARS:]
    if done.returncode:
        return {"ok": False, "command": command, "error": f"exit code {done.returncode}: {shown}"}
    return {"command": command}


def _kernels(setting: Setting, folder: Path) -> Item:
    found = [dataclasses.asdict(kernel) for kernel in read_rocprof(folder)]
    return {"measured": not setting.simulated, "kernels": found}
