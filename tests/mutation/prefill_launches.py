"""The launches that mutants of the prefill scorer must survive, for each number of heads.

Together ``launches`` execute every instruction of the kernel, but few blocks, so that a mutant dies within a
second. ``sweep`` takes what chooses a path through every value: only for the few mutants that are left.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from kernel.gfx950 import SCHEDULES, Kernel, Memory, Program, RunOptions, RunReport, Schedule, run
from kernel.page import blocks_of
from kernel.plan import (
    MAXIMA_BLOCKS,
    MOST_SCORE_BLOCKS,
    STORE_BLOCKS,
    TILE_ROWS,
    WorkItem,
    pack_items,
    plan_prefill,
)
from tests.mutation.equivalents import Equivalent
from tests.mutation.launch import (
    HEAD_STRIDE,
    PAGE_STRIDE,
    POISON,
    THREADS,
    TOKEN_STRIDE,
    WAVE_INSTRUCTIONS,
    Float32Array,
    WrongWorkError,
    check_cells,
    register_operands,
    register_pages,
    register_rows,
)
from tests.support.calls import ONE, Call, pack_page, random_call
from tests.support.compare import oracle_scores

# Single launches of the prefill scorer's assembly, without FlyDSL's launcher: small, sharp and exact.
#
# A launch is one work item of a plan, or several in one grid. Whatever it must write is known from the oracle
# and the item alone, and everything else it must leave as it was.

_BARRIERS = 40
"""Twice as many as a workgroup of these launches passes."""


@dataclass(frozen=True)
class Case:
    """A call and how it is launched: for scores ``[H, total_q, columns]``, with or without group maxima.

    ``table`` is a block table that reads as the call's.
    """

    name: str
    call: Call
    columns: int
    slots: int = 1
    maxima: bool = False
    table: torch.Tensor | None = None

    @cached_property
    def items(self) -> list[WorkItem]:
        batch = self.call.batch()
        return plan_prefill(
            batch.requests,
            batch.num_heads,
            table_stride=self.call.block_table.shape[1],
            score_blocks=MOST_SCORE_BLOCKS,
            slots=self.slots,
            alignment=MAXIMA_BLOCKS if self.maxima else STORE_BLOCKS,
        )

    @cached_property
    def oracle(self) -> Float32Array:
        scores: Float32Array = oracle_scores(self.call, self.columns).numpy()
        return scores

    @cached_property
    def lut(self) -> npt.NDArray[np.uint8]:
        return self.call.batch().lut.numpy()


@dataclass(frozen=True)
class PrefillLaunch:
    """Some items of a case as one grid."""

    case: Case
    items: tuple[WorkItem, ...]
    schedule: Schedule

    @property
    def name(self) -> str:
        blocks = ", ".join(f"{item.first_block}:{item.end_block}" for item in self.items[:1])
        return f"{self.case.name} {self.items[0].first_token}+{self.items[0].num_tokens} blocks {blocks}"

    @cached_property
    def expected(self) -> tuple[Float32Array, Float32Array]:
        """Scores and maxima, poison where these items have nothing to write."""
        case = self.case
        heads, tokens, columns = case.oracle.shape
        scores = np.full((heads, tokens, columns), POISON, np.float32)
        maxima = np.full((heads, tokens, -(-columns // MAXIMA_BLOCKS)), POISON, np.float32)
        for item in self.items:
            rows = slice(item.first_token, item.first_token + item.num_tokens)
            end = min(max(item.end_block, item.fill_end), columns)
            scores[:, rows, item.first_block : end] = case.oracle[:, rows, item.first_block : end]
            if case.maxima:
                for group in range(item.first_block // MAXIMA_BLOCKS, -(-end // MAXIMA_BLOCKS)):
                    cells = case.oracle[:, rows, MAXIMA_BLOCKS * group : MAXIMA_BLOCKS * (group + 1)]
                    maxima[:, rows, group] = cells.max(-1)
        return scores, maxima

    def under(self, schedule: Schedule) -> PrefillLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongScoresError for what it writes."""
        call = self.case.call
        expected_scores, expected_maxima = self.expected
        scores, maxima = (np.full_like(x, POISON) for x in self.expected)
        memory = Memory()
        operands = {
            "q": call.q.view(torch.uint8).numpy(),
            "lut": self.case.lut,
            "table": (call.block_table if self.case.table is None else self.case.table).numpy(),
            "work": np.frombuffer(pack_items(self.items), np.int32).copy(),
        }
        at = register_operands(memory, operands)
        at_scores = register_rows(memory, scores, "scores", 32)
        at_maxima = register_rows(memory, maxima, "maxima", 64) if self.case.maxima else 0
        at_pages = register_pages(memory, call, range(call.pages.shape[0]))
        strides = (HEAD_STRIDE, TOKEN_STRIDE)
        kernargs = struct.pack(
            "<12q4i",
            at["q"], at_pages, PAGE_STRIDE, at["lut"], at_scores, *strides, at_maxima, *strides, at["table"],
            at["work"], call.pages.shape[0], self.case.columns, call.init_blocks, call.local_blocks,
        )  # fmt: skip
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(len(self.items), 1, 1),
            block=(THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=WAVE_INSTRUCTIONS, barrier_limit=_BARRIERS),
        )
        check_cells(f"scores of {self.name}", scores, expected_scores)
        if self.case.maxima:
            check_cells(f"maxima of {self.name}", maxima, expected_maxima)
        return report


def one_each(case: Case, schedules: Sequence[Schedule]) -> list[PrefillLaunch]:
    """A launch for each item of a case, under one schedule after the other."""
    return [PrefillLaunch(case, (item,), schedules[i % len(schedules)]) for i, item in enumerate(case.items)]


@cache
def launches(heads: int) -> tuple[PrefillLaunch, ...]:
    """The launches, all of them exact: scores are the same bits as the oracle's."""
    tile = TILE_ROWS // heads
    found: list[PrefillLaunch] = []
    for case in cases(heads, tile):
        found += one_each(case, SCHEDULES)
    decode = _case("decode", [(1, 1), (128, 1), (257, 2)], heads, seed=21, columns=3)
    return (*found, PrefillLaunch(decode, tuple(decode.items), SCHEDULES[1]))


def cases(heads: int, tile: int) -> list[Case]:
    prefixes = sorted({1, max(16 - 16 // heads, 1), 13, *(16 * m + 2 * m + 1 for m in range(1, 7)), 127})
    return [
        # the diagonal inside an M-tile, a tail, plain groups before it, 2 segments
        _case("unaligned", [(5 * 128 + 37 + tile - 5, tile - 5)], heads, seed=11, slots=2),
        # the diagonal at a block's edge
        _case("aligned", [(4 * 128 + tile, tile)], heads, seed=12),
        # the diagonal in each M-tile, at most of its tokens; a wave's last query ends a block or begins one
        _case("diagonals", [(prefix + 128, 128) for prefix in prefixes], heads, seed=15),
        # the last block seen whole: the last of the maxima leaves a plain group
        _case("whole", [(512, 1), (1280, 1), (511, 1)], heads, seed=16, maxima=True),
        # sentinels keep a group from being plain; waves that have no row by one
        _case("local", [(512, 1), (1023, 8), (1200, 4)], heads, seed=17, forced=(0, 1), columns=16),
        _case("init", [(1025, 3), (1300, 128 if heads == 1 else 8)], heads, seed=18, forced=(4, 0)),
        # sentinels, groups of 16, cells past the end
        _case(
            "forced", [(18 * 128 + 30, 90)], heads, seed=13, forced=(5, 1), slots=2, columns=39, maxima=True
        ),
        _case(
            "ragged",
            [(300, 45), (0, 0), (129, 1), (127, 2), (517, 70), (650, 11)],
            heads,
            seed=14,
            forced=(1, 2),
            columns=7,
        ),
        # the largest keys and queries, at a block's edge and elsewhere
        _extreme_case([(256, 128), (269, 128)], heads),
        _outside_case([(17 * 128 + 37, 8), (200, 3)], heads),
        # rows that end at each cell of a group: behind the last block, and behind the cells past the end
        *(
            _case(f"{end} cells", [(128 * end - 3, 2), (100, 1)], heads, seed=19, columns=end)
            for end in (5, 6, 7)
        ),
    ]


@cache
def sweep(heads: int) -> tuple[PrefillLaunch, ...]:
    """Launches of many items: every ``prefix mod 128``, every count of blocks up to 9 between sentinels, and
    diagonals at a block's edge with blocks and queries around them."""
    found = []
    tile = TILE_ROWS // heads
    for forced in ((0, 0), (1, 2), (4, 1)):
        lengths = [(128 * before + tokens, tokens) for before in range(6) for tokens in (1, 77)]
        lengths += [(128 * before + tile, tile) for before in (0, 3)]
        found.append(_case(f"aligned, forced {forced}", lengths, heads, seed=23, forced=forced))
    for first in range(0, 128, 16):
        lengths = [(prefix + 128, 128) for prefix in range(first, first + 16)]
        found.append(_case(f"prefixes from {first}", lengths, heads, seed=first))
    lengths = [(128 * blocks - 61 * (blocks % 2), 1 + blocks % 3) for blocks in range(1, 10)]
    for forced in itertools.product((0, 1, 4, 5), (0, 1)):
        columns, maxima = (9, True) if sum(forced) % 2 else (12, False)
        name = f"{forced} forced, {columns} cells"
        found.append(_case(name, lengths, heads, seed=20, forced=forced, columns=columns, maxima=maxima))
    return tuple(
        PrefillLaunch(case, tuple(case.items), SCHEDULES[at % len(SCHEDULES)])
        for at, case in enumerate(found)
    )


def _outside_case(lengths: list[tuple[int, int]], heads: int) -> Case:
    """Page ids outside the cache, read as the nearest inside."""
    case = _case("page ids outside", lengths, heads, seed=24)
    num_pages = case.call.pages.shape[0]
    ids = torch.tensor([-(2**31), 2**31 - 1, num_pages, -1, 3], dtype=torch.int32)
    table = ids.repeat(case.call.block_table.numel())[: case.call.block_table.numel()]
    table = table.view_as(case.call.block_table)
    return replace(case, call=replace(case.call, block_table=table.clamp(0, num_pages - 1)), table=table)


def _extreme_case(lengths: list[tuple[int, int]], heads: int) -> Case:
    """One dimension of each key and of each row of queries is 384, the first value that E5M2 has as infinity;
    the others are smaller and none is 0, so that no NaN comes of it. Sums are exact."""
    random = np.random.default_rng(22)
    call = random_call(lengths, heads, seed=22)
    tokens = np.arange(BLOCK_TOKENS)
    for page in call.pages.numpy():
        codes = random.integers(1, 6, (BLOCK_TOKENS, HEAD_DIM), np.uint8)  # magnitudes 0.5 to 3
        groups = random.integers(0, HEAD_DIM // 16, BLOCK_TOKENS)
        codes[tokens, 16 * groups + random.integers(0, 16, BLOCK_TOKENS)] = 7  # 6
        codes |= random.integers(0, 2, codes.shape, np.uint8) << 3
        scales = np.full((BLOCK_TOKENS, HEAD_DIM // 16), ONE, np.uint8)
        scales[tokens, groups] = ONE + 8 * 6  # 64
        page[:] = pack_page(codes, scales)
    queries = call.q.view(torch.uint8).numpy().reshape(-1, HEAD_DIM)
    queries[:] = ONE
    rows = np.arange(len(queries))
    queries[rows, random.integers(0, HEAD_DIM, len(rows))] = 0x7C
    queries |= random.integers(0, 2, queries.shape, np.uint8) << 7
    return Case("extreme", call, blocks_of(max(seq_len for seq_len, _ in lengths)))


def _case(
    name: str,
    lengths: list[tuple[int, int]],
    heads: int,
    *,
    seed: int,
    forced: tuple[int, int] = (0, 0),
    slots: int = 1,
    columns: int | None = None,
    maxima: bool = False,
) -> Case:
    call = random_call(lengths, heads, seed=seed).forcing(*forced)
    call.q.view(torch.uint8)[5::23] = 0  # scores of 0 show any start value but 0
    blocks = blocks_of(max(seq_len for seq_len, _ in lengths))
    return Case(name, call, blocks if columns is None else columns, slots, maxima)


# What the matrix unit is due to do for an item: code that takes a longer way to its scores is wrong.
#
# Told from the item alone, block by block; see the kernel's text for its paths.

_WAVES, _TILES, _TILE = 4, 8, 16
_WHOLE = _TILES * _TILES
"""MFMAs of a wave for a block that all its rows see whole."""


@dataclass(frozen=True)
class Work:
    """Trips of all waves through the code of a plain group and of a whole block, and their other MFMAs."""

    plain_groups: int
    whole_blocks: int
    others: int


def check_work(launch: PrefillLaunch, report: RunReport) -> None:
    """Raises WrongWorkError if a launch ran other matrix instructions than its items are due."""
    due, done = due_work(launch), _done_work(report)
    if done != due:
        raise WrongWorkError(f"{launch.name}: {done} instead of {due}")


def due_work(launch: PrefillLaunch) -> Work:
    """Groups of four blocks that need neither mask nor sentinel are plain. In others a wave's block is whole
    if its first query, which sees the least, sees all of it."""
    call = launch.case.call
    plain = whole = others = 0
    for item in launch.items:
        for first in range(item.first_block, item.end_block, STORE_BLOCKS):
            group = range(first, first + STORE_BLOCKS)
            if all(_is_plain(item, block, call.init_blocks, call.local_blocks) for block in group):
                plain += _WAVES
                continue
            for block in range(first, min(first + STORE_BLOCKS, item.end_block)):
                for position in _wave_positions(item, call.num_heads):
                    ahead = position - BLOCK_TOKENS * block
                    if ahead >= BLOCK_TOKENS - 1:
                        whole += 1
                    else:
                        others += sum(_pairs(ahead, call.num_heads))
    return Work(plain, whole, others)


def _is_plain(item: WorkItem, block: int, init_blocks: int, local_blocks: int) -> bool:
    """Whether every row sees the block whole and gets no sentinel for it; the first row sees the least."""
    seen = item.position // BLOCK_TOKENS + 1
    whole = BLOCK_TOKENS * (block + 1) <= item.position + 1
    return block < item.end_block and whole and init_blocks <= block < seen - local_blocks


def _wave_positions(item: WorkItem, heads: int) -> Iterator[int]:
    """Position of the first query of each wave that has any."""
    for wave in range(_WAVES):
        token = BLOCK_TOKENS * (wave // heads) + _TILE // heads * (wave % heads)
        if token < item.num_tokens:
            yield item.position + token


def _pairs(ahead: int, heads: int) -> Iterator[int]:
    """N-tiles multiplied for each M-tile, by a wave with its first query ``ahead`` of the block's start."""
    last = ahead + _TILE * (_TILES - 1) + (_TILE - 1) // heads
    for m in range(_TILES if last >= 0 else 0):
        # the diagonal of an N-tile lies in the M-tile of its first query and, for later ones, in the next
        unseen = max(m - ahead // _TILE - 1, 0)
        yield max(_TILES - unseen, 0)


def _done_work(report: RunReport) -> Work:
    """As ``due_work``: one stretch of code has the MFMAs of four whole blocks, and one those of one."""
    is_mfma = np.array([one.mnemonic.startswith("v_mfma") for one in report.kernel.instructions])
    edges = sorted({0, *report.kernel.labels.values(), len(is_mfma)})
    stretches = [slice(first, end) for first, end in itertools.pairwise(edges)]
    trips = []
    for mfmas in (STORE_BLOCKS * _WHOLE, _WHOLE):
        (stretch,) = [one for one in stretches if is_mfma[one].sum() == mfmas]
        trips.append(int(report.executed[stretch][is_mfma[stretch]][0]))
    plain, whole = trips
    done = int(report.executed[is_mfma].sum())
    return Work(plain, whole, done - (STORE_BLOCKS * plain + whole) * _WHOLE)


# ---- Compares of the prefill scorer that, changed, compute the same; reviewed one by one ----

REVIEWED = (
    Equivalent(
        "no plain group where plain_first = plain_end: its loop then makes no trip, and the careful groups "
        "before and behind it are those of one run",
        r".*; v_and_b32_e32 v, -4, v; v_mov_b32_e32 v, s; "
        r"compare flipped: v_cmp_lt_i32_e32 vcc, s, v -> v_cmp_le_i32_e32 vcc, s, v; .*",
        differs=True,
    ),
    Equivalent(
        "block >= min(block + 4, end) is false for every group: a group begins below the item's end",
        r"s_add_i32 s, s, 4; s_min_i32 s, s, s; v_mov_b32_e32 v, v; "
        r"compare flipped: s_cmp_ge_i32 s, s -> s_cmp_gt_i32 s, s; v_mov_b32_e32 v, 0xff800000; .*",
        differs=False,
    ),
    Equivalent(
        "block < fill_end for the first of four blocks: a group begins below its loop's end, and that is "
        "fill_end or, for scored blocks, the item's end, which is not behind it",
        r"s_mov_b64 s, 0; s_and_b64 vcc, exec, s; s_cbranch_vccz \S+; "
        r"compare flipped: s_cmp_lt_i32 s, s -> s_cmp_le_i32 s, s; s_cselect_b64 s, -1, 0; "
        r"s_and_b64 s, s, s; s_and_saveexec_b64 s, s",
        differs=False,
    ),
    Equivalent(
        "a first M-tile past the block would mean that the wave's first query sees the block whole",
        r"s_sub_i32 s, 0, s; constant shifted: s_cmp_gt_u32 s, 7 -> s_cmp_gt_u32 s, 8; s_cbranch_scc1 \S+; "
        r"s_min_u32 s, s, 6",
        differs=False,
    ),
    Equivalent(
        "no mask reaches its lower clamp: that takes a token 102 positions after the query, and there are 31",
        r"v_mov_b32_e32 v, 0xff800000; constant shifted: s_mov_b32 s, 0xcd000000 -> s_mov_b32 s, 0xcd000001; "
        r"v_mov_b32_e32 v, 0x7149f2ca",
    ),
)
