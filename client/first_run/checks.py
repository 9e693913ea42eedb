"""The checks of a first run: every kernel against the oracle."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial

import torch

from client.first_run.setting import Item, Setting, attempt
from indexer.case import Case
from indexer.made_cases import KINDS, Shape, make_case
from indexer.replay import load_case
from indexer.verify import verify_case
from kernel.backends.base import Order
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import MAX_ROWS, VARIANTS, Variant, variant_for
from kernel.backends.flydsl.launch import TopkLauncher
from kernel.backends.reference import ReferenceBackend
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES, SUPPORTED_HEADS
from kernel.plan import MAXIMA_BLOCKS

ORDERS: tuple[Order, ...] = ("score", "block")
KEY_TYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_BLOCKS = 2 * MAXIMA_BLOCKS + 2
"""Blocks from which the best one is selected through group maxima."""
_NUM_ROWS = 7
_NUM_KEYS = 67


def cases(setting: Setting) -> Iterator[Item]:
    """Seeded cases through insert, the scorers of every number of heads, and top-k."""
    kinds = ("ragged",) if setting.simulated else tuple(KINDS)
    for kind in kinds:
        for heads in SUPPORTED_HEADS:
            shape = Shape(setting.sizes.context, setting.sizes.queries, heads)
            name = f"{kind}, {heads} heads, {shape.context} keys"
            yield attempt(name, partial(_verified, setting, kind, shape))


def decode(setting: Setting) -> Iterator[Item]:
    """Decode steps of every number of heads, in both page layouts."""
    before = os.environ.get(geometry.VARIABLE)
    try:
        for layout in geometry.LAYOUTS:
            os.environ[geometry.VARIABLE] = layout  # set as a user of the benchmark's answer sets it
            for heads in SUPPORTED_HEADS:
                shape = Shape(setting.sizes.context, MAX_ROWS // heads, heads, batch=2)
                yield attempt(f"{layout}, {heads} heads", partial(_verified, setting, "m3", shape))
    finally:
        os.environ.pop(geometry.VARIABLE)
        if before is not None:
            os.environ[geometry.VARIABLE] = before


def select(setting: Setting) -> Iterator[Item]:
    """Selection through group maxima, which keeps no scores, against selection from scores."""
    for heads in SUPPORTED_HEADS:
        for queries in (1, MAX_ROWS // heads + 1):
            shape = Shape(GROUPED_BLOCKS * BLOCK_TOKENS, queries, heads, topk=1)
            name = f"{heads} heads, {queries} queries, {GROUPED_BLOCKS} blocks"
            yield attempt(name, partial(_same_selection, setting, shape))


def topk(setting: Setting) -> Iterator[Item]:
    """Every top-k kernel on tied scores, in both orders."""
    for variant in VARIANTS:
        for order in ORDERS:
            yield attempt(f"{variant.name}, order {order}", partial(_same_ids, setting, variant, order))


def insert(setting: Setting) -> Iterator[Item]:
    """Pages of keys of each dtype, byte for byte."""
    for dtype in KEY_TYPES:
        yield attempt(str(dtype).removeprefix("torch."), partial(_same_pages, setting, dtype))


def _verified(setting: Setting, kind: str, shape: Shape) -> Item:
    case = make_case(kind, shape)
    case = dataclasses.replace(case, local_blocks=0)  # a forced last block would hide a fault in its mask
    fields = dataclasses.asdict(verify_case(case, kind, setting.backend))
    del fields["case"], fields["engine"]
    return fields


def _same_selection(setting: Setting, shape: Shape) -> Item:
    case: Case = dataclasses.replace(make_case("m3", shape), local_blocks=0)
    scorer = load_case(case, setting.backend)
    found, expected = scorer.score(return_scores=False), scorer.score()
    return _compared(found.block_ids, expected.block_ids)


def _same_ids(setting: Setting, variant: Variant, order: Order) -> Item:
    device = setting.device()
    columns = _columns_of(variant)
    generator = torch.Generator().manual_seed(variant.best)
    scores = torch.randint(
        -9, 9, (2, _NUM_ROWS, columns), generator=generator, dtype=torch.float32, device="cpu"
    )
    lengths = [0, 1, variant.best, variant.best + 1, columns // 2, columns - 1, columns]
    num_blocks = torch.tensor(lengths, dtype=torch.int32, device="cpu").clamp(max=columns)
    for row, length in enumerate(num_blocks.tolist()):
        scores[:, row, length:] = -torch.inf
    expected = torch.full((2, _NUM_ROWS, variant.best), -7, dtype=torch.int32, device="cpu")
    ReferenceBackend().topk(scores, num_blocks, expected, order)
    gpu = device.torch_device
    found = torch.full_like(expected, -7).to(gpu)
    maxima = None if variant.most_groups is None else group_maxima(scores).to(gpu)
    TopkLauncher(device)(scores.to(gpu), num_blocks.to(gpu), found, order, maxima)
    return _compared(found.cpu(), expected)


def _compared(found: torch.Tensor, expected: torch.Tensor) -> Item:
    """Counts the rows of block ids ``[H, total_q, k]`` that differ."""
    wrong = (found != expected).any(dim=2)
    return {"ok": not wrong.any().item(), "rows": wrong.numel(), "wrong_rows": int(wrong.sum())}


def _columns_of(variant: Variant) -> int:
    """Fewest columns that select the variant, of at least three whole groups and a partial one."""
    longer = (one.most_groups * MAXIMA_BLOCKS + 1 for one in VARIANTS if one.most_groups)
    grouped = variant.most_groups is not None
    return min(
        columns
        for columns in (3 * MAXIMA_BLOCKS + 5, *longer)
        if variant_for(variant.best, columns, grouped) == variant
    )


def group_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Returns the maxima ``[H, total_q, ceil(S / 16)]`` of scores ``[H, total_q, S]``."""
    missing = -scores.shape[2] % MAXIMA_BLOCKS
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return padded.view(*padded.shape[:2], -1, MAXIMA_BLOCKS).amax(dim=3)


def _same_pages(setting: Setting, dtype: torch.dtype) -> Item:
    backend = setting.operations()
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(_NUM_KEYS, HEAD_DIM, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    slots = torch.randperm(2 * BLOCK_TOKENS, generator=generator, dtype=torch.int64, device="cpu")[:_NUM_KEYS]
    slots[::9] = -1
    expected = torch.full((2, PAGE_BYTES), 0xA5, dtype=torch.uint8, device="cpu")
    found = expected.to(backend.device, copy=True)
    ReferenceBackend().insert(keys, expected, slots)
    backend.insert(keys.to(backend.device), found, slots.to(backend.device))
    wrong = int((found.cpu() != expected).sum())
    return {"ok": wrong == 0, "bytes": expected.numel(), "wrong_bytes": wrong}
