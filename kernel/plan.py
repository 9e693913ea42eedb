"""Plans prefill launches on the host: which workgroup scores which query rows against which blocks.

A prefill launch is a list of work items, one a workgroup: a tile of up to ``TILE_ROWS`` query rows of one
request against a segment of the request's blocks. The tiles of a request cover its query rows, the segments
of a tile the blocks that its last row sees, so every (row, block below the row's ``nb``) lies in exactly one
item and no workgroup is dead. What an item computes depends on neither the other items nor the segment it
lies in: scores are the same bytes for every plan.

32 bits wide on the device, and checked, are: an offset into the block table, a query row (``token * H +
head``), a token, a position, a block. Byte offsets into pages, queries, scores and maxima are 64 bits wide. A
grid holds 2^32 threads at most: launches are chunked.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kernel.arguments import check_int
from kernel.batch import Request
from kernel.checks import check_heads
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_LEN
from kernel.errors import InvalidArgumentError
from kernel.page import blocks_of

TILE_ROWS = 512
"""Query rows of a work item, at most."""
STORE_BLOCKS = 4
"""Blocks whose scores are stored together: segments start at multiples of it."""
MAXIMA_BLOCKS = 16
"""Blocks of a group maximum. Where maxima are written, segments start at multiples of it: one item owns a
group."""
WORK_ITEM_DWORDS = 8
"""32-bit words of an item on the device."""
XCDS = 8
"""Dies of gfx950. Workgroups are dealt to them in turn, and each has an L2 of its own."""
MAX_LAUNCH_ITEMS = 2**32 // 256 - 1
"""Items of a launch: its threads, 256 an item, are counted in 32 bits."""

_ITEM_OVERHEAD_QUARTERS = 6
# Cost of an item beside its blocks, in quarters of a block: queries, the first page and the pipeline's start,
# about 3,000 predicted clocks where a block takes 2,048.
_SEGMENT_TRIALS = 4
# Items a workgroup slot may get on average, at most; beyond, start-up costs more than balance gains.
_SEGMENT_SIZES = tuple(1 << power for power in range(7, 14))
# Segments of 128 to 8,192 blocks are tried besides equal shares: a share just below the tallest tiles cuts
# each of them once too often, which a round number avoids.
_DEALT_PLANS = 3
# Plans that are dealt to the dies to see how they end there, the most promising of those tried.
_GROUPS_PER_DIE = 2
# A die gets its load in at least so many groups: one larger group would be a die's load alone, and uneven.

_INT32 = 2**31
_BEYOND = 1024
"""Upper bound of the rows or blocks that a kernel counts past the last one, in a tile or a group."""
MOST_SCORE_BLOCKS = _INT32 - _BEYOND - 1
"""Columns of the widest score buffer."""


@dataclass(frozen=True)
class WorkItem:
    """One workgroup's work, in the order of its 32-bit words on the device (the eighth is 0).

    Attributes:
        table_offset: index of the request's row in the flat block table.
        first_token: first query token, in ``q``.
        num_tokens: query tokens, ``TILE_ROWS // H`` at most.
        position: position of the first query token in its request.
        first_block: first block of the segment, a multiple of ``STORE_BLOCKS`` (``MAXIMA_BLOCKS`` with
            maxima).
        end_block: the block after the segment's last.
        fill_end: the item writes ``-inf`` from ``end_block`` to here, within the score columns of its launch;
            past ``end_block`` in the last segment of a tile only.
    """

    table_offset: int
    first_token: int
    num_tokens: int
    position: int
    first_block: int
    end_block: int
    fill_end: int

    @property
    def cost(self) -> int:
        """Predicted time, in quarters of a block."""
        return 4 * (self.end_block - self.first_block) + _ITEM_OVERHEAD_QUARTERS


@dataclass(frozen=True)
class _Tile:
    request: Request
    first: int
    """First query of the tile, counted in the request."""
    num_tokens: int
    num_blocks: int


def plan_prefill(
    requests: Sequence[Request],
    num_heads: int,
    *,
    table_stride: int,
    score_blocks: int,
    slots: int,
    alignment: int = STORE_BLOCKS,
    xcds: int = XCDS,
) -> list[WorkItem]:
    """Plan a prefill launch.

    Args:
        requests: the requests to score; those without queries give no items.
        num_heads: index heads, H.
        table_stride: columns of the block table.
        score_blocks: columns of the score buffer, ``S``: cells up to it are scored or filled with ``-inf``;
            ``MOST_SCORE_BLOCKS`` for buffers of any width.
        slots: workgroups that run at once, two for each compute unit.
        alignment: blocks that a segment's start is a multiple of, itself one of ``STORE_BLOCKS``.
        xcds: dies that the grid is dealt to in turn.

    Returns:
        Items in grid order: the heavy ones first, and the items that read the same pages at positions that
        are dealt to one die. Deterministic.

    Raises:
        InvalidArgumentError: an argument is out of range, or a number would not fit 32 bits on the device.
    """
    _check(
        requests,
        num_heads,
        table_stride=table_stride,
        score_blocks=score_blocks,
        slots=slots,
        alignment=alignment,
        xcds=xcds,
    )
    tiles = list(_tiles(requests, TILE_ROWS // num_heads))
    best: tuple[int, list[WorkItem]] | None = None
    for longest in _segment_blocks([tile.num_blocks for tile in tiles], slots, alignment):
        order = _grid_order(
            [
                item
                for tile in tiles
                for item in _segments(tile, longest, table_stride, score_blocks, alignment)
            ],
            xcds,
        )
        ends = dealt_makespan([item.cost for item in order], slots, xcds)
        if best is None or ends < best[0]:
            best = (ends, order)
    return best[1] if best is not None else []


def pack_items(items: Sequence[WorkItem]) -> array[int]:
    """The items as the device reads them: ``WORK_ITEM_DWORDS`` int32 an item."""
    words = array("i")
    for item in items:
        words.extend(
            (
                item.table_offset,
                item.first_token,
                item.num_tokens,
                item.position,
                item.first_block,
                item.end_block,
                item.fill_end,
                0,
            )
        )
    return words


def launches(num_items: int, most: int = MAX_LAUNCH_ITEMS) -> Iterator[range]:
    """The items of each launch, in order."""
    for first in range(0, num_items, most):
        yield range(first, min(first + most, num_items))


def makespan(costs: Sequence[int], slots: int) -> int:
    """Completion time of list scheduling: each of ``slots`` workgroup slots takes the next item when free."""
    busy = [0] * min(slots, len(costs))
    for cost in costs:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy, default=0)


def dealt_makespan(costs: Sequence[int], slots: int, xcds: int) -> int:
    """As :func:`makespan`, of items dealt in turn to ``xcds`` dies that share the slots evenly."""
    return max(makespan(costs[die::xcds], max(slots // xcds, 1)) for die in range(xcds))


_Key = tuple[tuple[Request, ...], int, int, int, int, int]


@dataclass(frozen=True)
class PackedPlan:
    """A plan as the device reads it.

    Attributes:
        num_items: work items.
        words: their int32 words, see :func:`kernel.plan.pack_items`.
    """

    num_items: int
    words: bytes


class PlanCache:
    """The most recently used plans: every layer of a model scores the same shape. May be used from several
    threads.

    Args:
        most: work items and requests of all plans that are kept together, some 100 bytes each.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        self._most = most
        self._size = 0
        self._plans: OrderedDict[_Key, PackedPlan] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Plans that are kept."""
        return len(self._plans)

    def plan(
        self,
        requests: tuple[Request, ...],
        num_heads: int,
        *,
        table_stride: int,
        score_blocks: int,
        slots: int,
        alignment: int,
    ) -> PackedPlan:
        """As :func:`kernel.plan.plan_prefill`, packed.

        Raises:
            InvalidArgumentError: see there.
        """
        key = (requests, num_heads, table_stride, score_blocks, slots, alignment)
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found
        items = plan_prefill(
            requests,
            num_heads,
            table_stride=table_stride,
            score_blocks=score_blocks,
            slots=slots,
            alignment=alignment,
        )
        made = PackedPlan(len(items), pack_items(items).tobytes())
        size = made.num_items + len(requests)
        with self._lock:
            if key not in self._plans and size <= self._most:
                self._plans[key] = made
                self._size += size
            while self._size > self._most:
                old, dropped = self._plans.popitem(last=False)
                self._size -= dropped.num_items + len(old[0])
        return made


# ---- Planning ----


def _tiles(requests: Sequence[Request], tokens: int) -> Iterator[_Tile]:
    """Tiles of a request; all but its first start at block boundaries where that takes no more tiles.

    There the kernel knows at compile time which products the diagonal leaves out.
    """
    for request in requests:
        lead = -request.prefix_len % BLOCK_TOKENS
        short = lead + (tokens - lead) // BLOCK_TOKENS * BLOCK_TOKENS
        fewest = -(-request.query_len // tokens)
        aligned = 0 < short < tokens and 1 - (short - request.query_len) // tokens <= fewest
        first, end = 0, min(short if aligned else tokens, request.query_len)
        while first < request.query_len:
            yield _Tile(request, first, end - first, blocks_of(request.prefix_len + end))
            first, end = end, min(end + tokens, request.query_len)


def _segment_blocks(tile_blocks: Sequence[int], slots: int, alignment: int) -> list[int]:
    """Lengths of the longest segment, in blocks, whose plans are predicted to end first on one die; best
    first."""
    if not tile_blocks:
        return []
    total = sum(4 * blocks + _ITEM_OVERHEAD_QUARTERS for blocks in tile_blocks)
    tallest = max(tile_blocks)
    shares = [
        max(total // (slots * trial) - _ITEM_OVERHEAD_QUARTERS, 0) // 4
        for trial in range(1, _SEGMENT_TRIALS + 1)
    ]
    # Segments shorter than the last share cost more start-up than they gain in balance.
    sizes = [size for size in _SEGMENT_SIZES if shares[-1] < size < tallest]
    ends: dict[int, int] = {}
    for size in (*shares, *sizes):
        longest = max(-(-size // alignment), 1) * alignment
        if longest not in ends:
            costs = [
                4 * (end - first) + _ITEM_OVERHEAD_QUARTERS
                for blocks in tile_blocks
                for first, end in _cuts(blocks, longest, alignment)
            ]
            ends[longest] = makespan(sorted(costs, reverse=True), slots)
    return sorted(ends, key=lambda longest: (ends[longest], -longest))[:_DEALT_PLANS]


def _cuts(blocks: int, longest: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Segments of at most ``longest`` blocks, as equal as their alignment allows."""
    units = -(-blocks // alignment)
    count = -(-units * alignment // longest)
    for k in range(count):
        yield alignment * (k * units // count), min(alignment * ((k + 1) * units // count), blocks)


def _segments(
    tile: _Tile, longest: int, table_stride: int, score_blocks: int, alignment: int
) -> Iterator[WorkItem]:
    for first_block, end_block in _cuts(tile.num_blocks, longest, alignment):
        yield WorkItem(
            table_offset=tile.request.table_row * table_stride,
            first_token=tile.request.query_start + tile.first,
            num_tokens=tile.num_tokens,
            position=tile.request.prefix_len + tile.first,
            first_block=first_block,
            end_block=end_block,
            fill_end=score_blocks if end_block == tile.num_blocks else end_block,
        )


def _grid_order(items: Sequence[WorkItem], xcds: int) -> list[WorkItem]:
    """Deals items to dies so that tiles that read the same pages share a die's L2; heavy items first."""
    sharing: dict[tuple[int, int], list[WorkItem]] = {}
    for item in items:
        sharing.setdefault((item.table_offset, item.first_block), []).append(item)
    groups = list(
        _small_groups(sharing.values(), sum(item.cost for item in items) // (xcds * _GROUPS_PER_DIE))
    )
    dies: list[list[WorkItem]] = [[] for _ in range(xcds)]
    load = [(0, die) for die in range(xcds)]
    for group in sorted(groups, key=lambda group: -sum(item.cost for item in group)):
        cost, die = load[0]
        heapq.heapreplace(load, (cost + sum(item.cost for item in group), die))
        dies[die].extend(group)
    queues = [sorted(die, key=attrgetter("cost"), reverse=True) for die in dies]
    # An empty queue takes from the longest one, so that no grid position stays empty.
    taken = [0] * xcds
    order: list[WorkItem] = []
    while len(order) < len(items):
        die = len(order) % xcds
        if taken[die] == len(queues[die]):
            die = max(range(xcds), key=lambda other: len(queues[other]) - taken[other])
        order.append(queues[die][taken[die]])
        taken[die] += 1
    return order


def _small_groups(groups: Iterable[list[WorkItem]], most_cost: int) -> Iterator[list[WorkItem]]:
    """Splits groups that cost more than ``most_cost``, between items."""
    for group in groups:
        part: list[WorkItem] = []
        cost = 0
        for item in group:
            if part and cost + item.cost > most_cost:
                yield part
                part, cost = [], 0
            part.append(item)
            cost += item.cost
        yield part


# ---- Checks ----


def _check(
    requests: Sequence[Request],
    num_heads: int,
    *,
    table_stride: int,
    score_blocks: int,
    slots: int,
    alignment: int,
    xcds: int,
) -> None:
    """Checks the arguments of :func:`plan_prefill`, and what is 32 bits wide on the device.

    The contract bounds a request's lengths, so positions and ``BLOCK_TOKENS * block`` fit; offsets in the
    block table, query rows and score columns are checked here.

    Raises:
        InvalidArgumentError: the first invalid argument.
    """
    check_heads(num_heads)
    _check_least("slots", slots, 1, "pass the workgroups that run at once, two for each compute unit")
    _check_least("xcds", xcds, 1, "pass the number of dies")
    if check_int("alignment", alignment) < STORE_BLOCKS or alignment % STORE_BLOCKS:
        raise InvalidArgumentError(
            "alignment",
            alignment,
            f"must be a positive multiple of {STORE_BLOCKS}",
            f"pass {STORE_BLOCKS} blocks or a multiple",
        )
    _check_least("table_stride", table_stride, 0, "pass the columns of the block table")
    _check_least("score_blocks", score_blocks, 0, "pass the columns of the score buffer")
    for at, request in enumerate(requests):
        _check_request(f"requests[{at}]", request, table_stride, score_blocks)
    last_row = max((request.table_row for request in requests), default=0)
    if (last_row + 1) * table_stride >= _INT32:
        raise InvalidArgumentError(
            "block_table.numel()", (last_row + 1) * table_stride, f"must be below {_INT32}", "split the batch"
        )
    tokens = max((request.query_start + request.query_len for request in requests), default=0)
    if tokens * num_heads + _BEYOND >= _INT32:
        raise InvalidArgumentError(
            "total_q * H", tokens * num_heads, f"must be below {_INT32 - _BEYOND}", "split the batch"
        )
    if score_blocks > MOST_SCORE_BLOCKS:
        raise InvalidArgumentError(
            "scores.shape[2]",
            score_blocks,
            f"must be below {_INT32 - _BEYOND}",
            "narrow the score buffer",
        )


def _check_request(name: str, request: Request, table_stride: int, score_blocks: int) -> None:
    _check_least(f"{name}.table_row", request.table_row, 0, "pass its row of the block table")
    _check_least(f"{name}.query_start", request.query_start, 0, "pass its first row of q")
    _check_least(f"{name}.query_len", request.query_len, 0, "pass how many query tokens it has")
    if check_int(f"{name}.seq_len", request.seq_len) < request.query_len:
        raise InvalidArgumentError(
            f"{name}.seq_len",
            request.seq_len,
            f"must be at least its {request.query_len} query tokens",
            "count this step's tokens in",
        )
    if request.seq_len > MAX_SEQ_LEN:
        raise InvalidArgumentError(
            f"{name}.seq_len",
            request.seq_len,
            f"must be at most {MAX_SEQ_LEN}",
            "shorten the context to what the model was made for",
        )
    for argument, columns in (("table_stride", table_stride), ("score_blocks", score_blocks)):
        if columns < request.num_blocks:
            raise InvalidArgumentError(
                argument,
                columns,
                f"must be at least the {request.num_blocks} blocks of {name}",
                "widen it to the longest request",
            )


def _check_least(argument: str, value: int, least: int, remedy: str) -> None:
    if check_int(argument, value) < least:
        raise InvalidArgumentError(argument, value, f"must be at least {least}", remedy)
