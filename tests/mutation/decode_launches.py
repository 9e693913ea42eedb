"""The launches that mutants of the decode scorer must survive, for each number of heads.

Together they execute every path of the kernel: the split among few and many requests, shares that end inside
one, the ring's loop and tails of one to three pages, every diagonal, sentinels, maxima of a wave's groups and
of groups that a workgroup shares, fills, and numbers that no host would let pass.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernel.backends.flydsl.geometry import MAX_ROWS
from kernel.contract import BLOCK_TOKENS
from kernel.gfx950 import SCHEDULES, Kernel, Memory, Program, RunOptions, RunReport, Schedule, run
from kernel.plan import MAXIMA_BLOCKS
from tests.gfx950.scorers import group_maxima
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
from tests.support.calls import Call, random_call, staircase_call
from tests.support.compare import oracle_scores

# ---- Single launches of the decode scorer's assembly, without FlyDSL's launcher: small, sharp and exact ----

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DecodeLaunch:
    """A call, launched on ``2^log_workgroups`` workgroups.

    Attributes:
        name: for people. call: what is scored. columns: of the scores. maxima: whether they are wanted.
        fill: whether cells past a request's blocks are filled. bounded: requests claim three queries more,
            which the launch's ``max_query_len`` leaves out, and ``nb`` of their tokens is wanted. extra:
            (table row, query start, query end, length) of requests that no host would let pass, after those
            of the call. extra_table: rows of the block table and extra_queries: tokens of ``q`` for them;
            what is written there is not looked at. schedule: the order of waves.
    """

    name: str
    call: Call
    columns: int
    log_workgroups: int = 0
    maxima: bool = False
    fill: bool = True
    bounded: bool = False
    extra: tuple[tuple[int, int, int, int], ...] = ()
    extra_table: tuple[tuple[int, ...], ...] = ()
    extra_queries: int = 0
    schedule: Schedule = SCHEDULES[0]

    @cached_property
    def requests(self) -> Int32Array:
        """``[4, batch]``: table rows, query starts, query ends, lengths."""
        starts = self.call.cu_seqlens_q.tolist()
        rows = list(zip(range(len(starts) - 1), starts[:-1], starts[1:], self.call.seq_lens.tolist()))
        requests: Int32Array = np.array([*rows, *self.extra], np.int32).T.copy()
        requests[2] += 3 * self.bounded
        return requests

    @property
    def max_query_len(self) -> int:
        """The launch's bound."""
        most = int(self.call.cu_seqlens_q.diff().max()) if self.bounded else MAX_ROWS
        return min(most, MAX_ROWS // self.call.num_heads)

    @cached_property
    def expected(self) -> tuple[Float32Array, Float32Array]:
        """Scores and maxima, poison where nothing is to be written."""
        scores = oracle_scores(self.call, self.columns)
        maxima = group_maxima(scores)
        if not self.fill:
            for request in self.call.batch().requests:
                rows = slice(request.query_start, request.query_start + request.query_len)
                scores[:, rows, request.num_blocks :] = torch.nan
                maxima[:, rows, -(-request.num_blocks // MAXIMA_BLOCKS) :] = torch.nan
        return scores.numpy(), maxima.numpy()

    @cached_property
    def lut(self) -> npt.NDArray[np.uint8]:
        return self.call.batch().lut.numpy()

    @cached_property
    def needed_pages(self) -> list[int]:
        """Pages of blocks that some row needs keys of; to touch another one is a fault."""
        if self.extra:
            return list(range(self.call.pages.shape[0]))
        needed: set[int] = set()
        for request in self.call.batch().requests:
            own = request.num_blocks - self.call.local_blocks
            whole = range(self.call.init_blocks, min(request.seq_len // BLOCK_TOKENS, own))
            first = (request.prefix_len + 1) // BLOCK_TOKENS if not self.call.local_blocks else own
            blocks = [*whole, *range(first, own)] if request.num_blocks else []
            needed.update(self.call.block_table[request.table_row, blocks].tolist())
        return sorted(needed)

    def under(self, schedule: Schedule) -> DecodeLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongScoresError for what it writes."""
        call = self.call
        scores, maxima = (
            np.full((x.shape[0], x.shape[1] + self.extra_queries, x.shape[2]), POISON) for x in self.expected
        )
        queries = call.q.view(torch.uint8).numpy()
        queries = np.concatenate([queries, *[queries[:1]] * self.extra_queries])
        table = call.block_table.numpy()
        table = np.concatenate([table, np.array(self.extra_table, np.int32).reshape(-1, table.shape[1])])
        memory = Memory()
        operands = {
            "q": queries,
            "lut": self.lut,
            "table": table,
            **{f"requests {field}": column for field, column in enumerate(self.requests)},
        }
        at = register_operands(memory, operands)
        at_scores = register_rows(memory, scores, "scores", 32)
        at_maxima = register_rows(memory, maxima, "maxima", 64) if self.maxima else 0
        at_pages = register_pages(memory, call, self.needed_pages)
        num_blocks = np.full(queries.shape[0], -1, np.int32)
        at_num_blocks = (
            memory.addresses_of({"num_blocks": num_blocks}, outputs=True)[0] if self.bounded else 0
        )
        most = min(self.columns, table.shape[1]) * BLOCK_TOKENS
        strides = (HEAD_STRIDE, TOKEN_STRIDE)
        kernargs = struct.pack(
            "<16q11i",
            at["q"], at_pages, PAGE_STRIDE, at["lut"], at_scores, *strides, at_maxima, *strides, at["table"],
            *(at[f"requests {field}"] for field in range(4)), at_num_blocks,
            *table.shape, self.requests.shape[1], queries.shape[0], call.pages.shape[0],
            self.max_query_len, most, self.columns if self.fill else 0, call.init_blocks, call.local_blocks,
            self.log_workgroups,
        )  # fmt: skip
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(1 << self.log_workgroups, 1, 1),
            block=(THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=WAVE_INSTRUCTIONS, trace=True),
        )
        own = slice(0, call.total_q)
        check_cells(f"scores of {self.name}", scores[:, own], self.expected[0])
        if self.maxima:
            check_cells(f"maxima of {self.name}", maxima[:, own], self.expected[1])
        if self.bounded:
            due = call.batch().num_blocks_per_query().numpy()
            check_cells(f"nb of {self.name}", num_blocks.view(np.float32), due.view(np.float32))
        return report


LEAST, MOST = -(2**31), 2**31 - 1


@cache
def launches(heads: int) -> tuple[DecodeLaunch, ...]:
    """The launches, all of them exact: scores are the same bits as the oracle's."""
    found = [
        _diagonals(heads),
        DecodeLaunch("tails", _call([(5 * 128, 1), (6 * 128 + 9, 2), (7 * 128 - 1, 1)], heads, 31), 7),
        DecodeLaunch("loop", _call([(21 * 128 + 40, 2), (300, 1)], heads, 32), 23),
        DecodeLaunch("forced", _call([(1400, 3), (257, 1), (130, 2)], heads, 33, (3, 2)), 75),
        DecodeLaunch("groups", _call([(40 * 128, 1), (33 * 128 + 1, 2)], heads, 34, (1, 0)), 40, maxima=True),
        DecodeLaunch("shared", _call([(17 * 128 + 5, 2)], heads, 35, (0, 1)), 37, maxima=True),
        DecodeLaunch("spread", _call([(300, 1), (700, 2), (1, 1)], heads, 36), 7, 1, maxima=True),
        DecodeLaunch("unfilled", _call([(300, 1), (700, 1)], heads, 37), 20, 1, maxima=True, fill=False),
        DecodeLaunch("many requests", _call(_padded(66, 22), heads, 38), 3),
        DecodeLaunch("padding", _call(_padded(520, 64), heads, 39), 4, maxima=True),
        DecodeLaunch("padding inside shares", _call(_padded(400, 66), heads, 41), 4),
        # The first block that is needed and the last one in each place where a page is requested.
        *(
            DecodeLaunch(f"slot {slot}", _call([(512 * (slot + 1) - 3, 3)], heads, 50 + slot, (slot, 1)), 33)
            for slot in range(8)
        ),
        *(
            DecodeLaunch(
                f"{blocks} blocks", _call([(128 * blocks - 3, 1)], heads, blocks, (blocks - 9, 1)), 23
            )
            for blocks in range(10, 22)
        ),
        # Shares of four blocks, of which the last one's latter two are not needed: while its first two are
        # scored each could request one of them.
        DecodeLaunch("two local blocks", _call([(16 * 128 - 3, 1)], heads, 43, (0, 2)), 23),
        # Each request in turn of those that a lane counts may be the first past the batch.
        *(
            DecodeLaunch(f"{batch} requests", _call(_late(batch), heads, 42), 2)
            for batch in (64, 193, 256, *range(300, 304))
        ),
        DecodeLaunch("two diagonals", _call([(130, 4), (387, 4)], heads, 45), 5),
        DecodeLaunch("bounded", _call([(300, 1), (129, 1), (700, 1)], heads, 44), 8, bounded=True),
        _hostile(heads, maxima=False),
        _hostile(heads, maxima=True),
        # Rows that end in a trip's next to last block and in its last one, and a wave's quarter of a group
        # that begins where the request's blocks end.
        DecodeLaunch("ends of trips", _call([(15 * 128 + 2, 4), (500, 1)], heads, 46), 17, maxima=True),
        # A diagonal in the third quarter of a spread group, whose wave must not store the group's place.
        DecodeLaunch("third quarter", _call([(8 * 128 + 40, 2)], heads, 47), 12, maxima=True),
    ]
    return tuple(launch.under(SCHEDULES[at % len(SCHEDULES)]) for at, launch in enumerate(found))


def _diagonals(heads: int) -> DecodeLaunch:
    """Every ``position mod 128``: the score of a block is the last token that its row sees."""
    queries = MAX_ROWS // heads
    lengths = [(prefix + queries, queries) for prefix in range(0, 128, queries)]
    return DecodeLaunch("diagonals", staircase_call(lengths, heads), 2)


def _call(lengths: list[tuple[int, int]], heads: int, seed: int, forced: tuple[int, int] = (0, 0)) -> Call:
    """``lengths`` have as many queries for four heads as given, and as many rows for fewer."""
    rows = [(seq_len, min(4 * queries, MAX_ROWS, seq_len * heads)) for seq_len, queries in lengths]
    return _with_zeros(
        random_call([(seq_len, num // heads) for seq_len, num in rows], heads, seed=seed), forced
    )


def _with_zeros(call: Call, forced: tuple[int, int] = (0, 0)) -> Call:
    call.q.view(torch.uint8)[2::5] = 0  # scores of 0 show any start value but 0
    return call.forcing(*forced)


def _padded(batch: int, every: int) -> list[tuple[int, int]]:
    """Requests of one or two blocks among padding, some of which has keys; one of them the last."""
    return [
        (1 + 67 * row % 250, 1) if row % every == 1 or row == batch - 1 else (0 if 37 * row % 11 else 100, 0)
        for row in range(batch)
    ]


def _late(batch: int) -> list[tuple[int, int]]:
    """Requests in the middle and at the end only."""
    return [(200, 1) if row in (batch // 2, batch - 1) else (0, 0) for row in range(batch)]


def _hostile(heads: int, *, maxima: bool) -> DecodeLaunch:
    """Rows, queries, lengths and page ids outside everything, beside a legal request."""
    call = _with_zeros(random_call([(1100, 1)], heads, seed=40))
    width, num_pages = call.block_table.shape[1], call.pages.shape[0]
    ids = tuple(([LEAST, MOST, num_pages, -1, 0, 1] * 2)[:width])
    extra = (
        (1, 1, 2, MOST), (3, 2, 3, 200), (MOST, 5, 6, 200), (-1, MOST, LEAST, 200), (1, LEAST, 5, 1),
        (1, 4, 5, LEAST), (1, 6, 5, 200), (1, 0, 0, 200), (1, 8, 60, 130), (1, 6, 7, 300), (2, 7, 8, MOST),
    )  # fmt: skip
    name = "hostile with maxima" if maxima else "hostile"
    table = (ids, (num_pages,) * width)
    return DecodeLaunch(name, call, width, maxima=maxima, extra=extra, extra_table=table, extra_queries=9)


# How many matrix instructions each wave of a decode launch is due to run: the split, told once more.
#
# Scores stay right where a wave takes more than its share, or multiplies what nobody asked for.

_WAVES = 4
_TRIP = 4
_PAGE_MFMAS = 8


def check_work(launch: DecodeLaunch, report: RunReport) -> None:
    """Raises WrongWorkError if a wave ran other matrix instructions than it is due."""
    mfmas = [at for at, one in enumerate(report.kernel.instructions) if one.mnemonic.startswith("v_mfma")]
    for workgroup in range(1 << launch.log_workgroups):
        for wave in range(_WAVES):
            due = _PAGE_MFMAS * sum(_pages(launch, workgroup, wave))
            done = int(np.isin(report.traces[workgroup, wave], mfmas).sum())
            if done != due:
                raise WrongWorkError(
                    f"{launch.name}: wave {wave} of workgroup {workgroup} ran {done} MFMAs instead of {due}"
                )


def _pages(launch: DecodeLaunch, workgroup: int, wave: int) -> Iterator[int]:
    """Pages that a wave multiplies for each request: its blocks, and those of a diagonal once more."""
    blocks = [_num_blocks(launch, *column) for column in launch.requests.T[:, 1:].tolist()]
    unit = MAXIMA_BLOCKS if launch.maxima else 1
    total = sum(-(-count // unit) for count in blocks)
    shared = launch.maxima and total <= 2 << launch.log_workgroups
    share = workgroup if shared else _WAVES * workgroup + wave
    shares = 1 << launch.log_workgroups if shared else _WAVES << launch.log_workgroups
    first, end = share * total // shares, (share + 1) * total // shares
    before = 0
    for number, count in enumerate(blocks):
        units = -(-count // unit)
        mine = range(unit * max(first - before, 0), min(unit * min(end - before, units), count))
        before += units
        if shared:
            quarter = (wave + number) % _WAVES
            mine_of_group = [block for block in mine if block % MAXIMA_BLOCKS // _TRIP == quarter]
        else:
            mine_of_group = list(mine)
        diagonal = sum(block >= _first_diagonal(launch, number) for block in mine_of_group)
        yield len(mine_of_group) + diagonal


def _num_blocks(launch: DecodeLaunch, start: int, end: int, seq_len: int) -> int:
    """Blocks that a request has scores for."""
    _, seq_len = _clamped(launch, start, end, seq_len)
    return -(-seq_len // 128)


def _clamped(launch: DecodeLaunch, start: int, end: int, seq_len: int) -> tuple[int, int]:
    """Queries and keys of a request as the device reads them, none where it has no row."""
    total_q = launch.call.total_q + launch.extra_queries
    queries = min(max(min(end, total_q), 0) - max(start, 0), launch.max_query_len)
    most = min(launch.columns, launch.call.block_table.shape[1]) * BLOCK_TOKENS
    keys = min(max(seq_len, 0), most)
    return (min(queries, keys), keys) if queries > 0 and keys > 0 else (0, 0)


def _first_diagonal(launch: DecodeLaunch, number: int) -> int:
    """The first block that some row sees in part, where it is scored: past every block with local blocks."""
    if launch.call.local_blocks:
        return 1 << 30
    queries, keys = _clamped(launch, *launch.requests[1:, number].tolist())
    return (keys - queries + 1) // BLOCK_TOKENS


# ---- Mutants of the decode scorer that compute the same, reviewed one by one ----

REVIEWED = (
    Equivalent(
        "a share that begins or ends with a request then looks at one more, of which it has no block",
        r"compare flipped: (v_cmp_g[te]_i32_e(32 vcc|64 s), s, v -> .*s_bcnt1_i32_b64|"
        r"v_cmp_gt_i32_e64 s, s, v -> v_cmp_ge_i32_e64 s, s, v; (v_readlane_b32|v_sub_u32_e32)|"
        r"v_cmp_g[te]_i32_e32 vcc, s, v -> .*s_cselect_b64)",
        differs=True,
    ),
    Equivalent(
        "a share of no block then looks at one request, of which it has none",
        r"compare flipped: s_cmp_(lt_i32 s, s -> s_cmp_le_i32 s, s; v_and_b32_e32 v, (15|0x3c0), v|"
        r"ge_i32 s, s -> s_cmp_gt_i32 s, s; s_waitcnt lgkmcnt\(0\); s_barrier)",
        differs=False,
    ),
    Equivalent(
        "the request past the batch lies behind every share",
        r"buffer_load_dword v, v, s, 0 offen; compare flipped: v_cmp_gt_u32_e32 vcc, s, v -> .*; "
        r"s_waitcnt vmcnt\(2\)",
        differs=True,
    ),
    Equivalent(
        "requests past the batch lie behind every share, whatever their length",
        r"v_sub_u32_e32 v, v, v; s_waitcnt vmcnt\(0\); v_max_i32_e32 v, 0, v; "
        r"constant shifted: v_cndmask_b32_e32 v, 0, v, vcc -> v_cndmask_b32_e32 v, 1, v, vcc; "
        r"v_min_i32_e32 v, s, v; v_min_i32_e32 v, s, v; v_add_u32_e32 v, v, v",
    ),
    Equivalent(
        "a part that begins where its request's blocks end is a wave's quarter of a spread group, and the "
        "last block does not lie in that quarter",
        r"s_or_b64 exec, exec, s; compare flipped: s_cmp_gt_u32 s, s -> s_cmp_ge_u32 s, s; "
        r"s_cselect_b64 s, -1, 0; s_cmp_ge_i32 s, s; s_cselect_b64 s, -1, 0",
        differs=True,
    ),
    Equivalent(
        "a number up to two past the batch lies behind the descriptors, reads as 0, has no keys; the clamp "
        "is for loads that LLVM merges, and these are not",
        r"operation changed: s_add_i32 s, s, -1 -> s_sub_i32 s, s, -1; s_waitcnt vmcnt\(0\); "
        r"v_min_u32_e32 v, s, v; v_lshlrev_b32_e32 v, 2, v",
    ),
    Equivalent(
        "the 64th request is then read from memory instead of LDS: the same numbers",
        r"compare flipped: s_cmp_gt_i32 s, 63 -> s_cmp_ge_i32 s, 63",
        differs=True,
    ),
    Equivalent(
        "what sees four blocks whole and without sentinels gets the same scores with their selections",
        r"v_max3_f32 v, v, v, v; .*compare flipped: s_cmp_(lt|gt)_i32 s, s -> s_cmp_(le|ge)_i32 s, s; "
        r"s_(cselect_b64 s, -1, 0|mov_b32 s, s); s_(cmp_gt_i32|mov_b32|cselect_b64) s, |"
        r"s_mov_b32 s, s; s_cselect_b64 s, -1, 0; compare flipped: s_cmp_gt_i32 s, s -> s_cmp_ge_i32 s, s; "
        r"s_cselect_b64 s, -1, 0; v_permlane32_swap_b32_e32 v, v; v_permlane32_swap|"
        r"compare flipped: s_cmp_gt_i32 s, s -> s_cmp_ge_i32 s, s; "
        r"(s_cselect_b64 s, -1, 0; s_cmp_gt_i32 s, s; )?v_mov_b32_e32 v, 0xff800000",
    ),
    Equivalent(
        "a tail ends less than four blocks behind its first one",
        r"s_cselect_b64 s, 0, -1; compare flipped: s_cmp_ge_i32 s, s -> s_cmp_gt_i32 s, s; s_cselect_b64",
        differs=False,
    ),
    Equivalent(
        "where nothing is left to fill the loop's one trip finds no lane with a cell",
        r"s_add_i32 s, s, 64; compare flipped: s_cmp_lt_[iu]32 s, s -> s_cmp_le|"
        r"s_waitcnt lgkmcnt\(0\); compare flipped: s_cmp_lt_i32 s, s -> s_cmp_le_i32 s, s; "
        r"s_cselect_b64 s, -1, 0; s_and_b64 s, s, exec; s_cselect_b32 s, s, 0|"
        r"s_cselect_b32 s, s, s; compare flipped: s_cmp_lt_u32 s, s -> s_cmp_le_u32 s, s; s_mov_b32 s, 0",
    ),
    Equivalent(
        "lane 16 then stores or leaves what lane 0 does: the same maximum in the same place",
        r"compare flipped: v_cmp_gt_i32_e(32 vcc|64 s), 16, v -> .*; s_and_b64",
        differs=True,
    ),
    Equivalent(
        "a row that stands on the first token of the block behind a diagonal has its own score of that one, "
        "which follows",
        r"v_permlane16_swap_b32_e32 v, v; compare flipped: v_cmp_gt_i32_e64 s, s, v -> .*; "
        r"v_max_f32_e32 v, v, v; s_and_b64",
        differs=True,
    ),
    Equivalent(
        "an end of the plain blocks that is too low: those behind it get the same scores with their "
        "selections",
        r"s_lshr_b32 s, s, 7; s_sub_i32 s, s, s; operation changed: s_add_i32 s, s, 1 -> s_sub_i32 s, s, 1; "
        r"s_mov_b64 s, s; s_min_i32 s, s, s",
    ),
    Equivalent(
        "the pair is exec where this is reached, and all 64 lanes are active",
        r"v_permlane32_swap_b32_e32 v, v; deleted: s_mov_b64 s, -1 -> s_nop 0; v_max_f32_e32 v, v, v",
    ),
    Equivalent(
        "the number of a block has no sign",
        r"s_lshr_b32 s, s, 2; constant shifted: s_and_b32 s, s, 0x3ffffffc -> s_and_b32 s, s, 0x1ffffffc",
    ),
    Equivalent(
        "the first thread of a wave is a multiple of 64",
        r"compare flipped: s_cmpk_gt_u32 s, 0x7f -> s_cmpk_ge_u32 s, 0x7f; s_waitcnt lgkmcnt\(0\); s_barrier",
        differs=False,
    ),
    Equivalent(
        "a descriptor's selection of components is for typed accesses, and the kernel has none",
        r"constant shifted: s_mov_b32 s, 0x27000 -> s_mov_b32 s, 0x27001",
    ),
)

_OF_SEVERAL_HEADS = (
    Equivalent(
        "a request of two or four heads has more than one row",
        r"s_cselect_b32 s, s, 0; compare flipped: s_cmp_lt_i32 s, 1 -> s_cmp_le_i32 s, 1; s_cbranch_scc1",
        differs=False,
    ),
)


def reviewed_of(heads: int) -> tuple[Equivalent, ...]:
    """The entries for the kernel of so many heads."""
    return REVIEWED + _OF_SEVERAL_HEADS * (heads > 1)
