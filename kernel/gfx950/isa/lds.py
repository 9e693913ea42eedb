"""LDS reads and writes (``ds_``). They finish in order, and ``lgkmcnt`` counts them.

The data moves at the issue, which no correct program can tell from later: until the covering wait the
registers are refused, and LDS bytes are ordered by the race rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import RaceError, UnsupportedInstructionError
from kernel.gfx950.isa import table
from kernel.gfx950.isa.form import Form, Step
from kernel.gfx950.isa.table import Row
from kernel.gfx950.memory import cells
from kernel.gfx950.wave import Flight, Lds, Wave, each_lane

# ---- Bank conflicts ----
#
# An ASSUMPTION, not a published fact: 64 banks of 4 bytes; an access of b bytes a lane is served in groups of
# 256 / b consecutive lanes (so that a group asks for one dword of every bank at best); lanes that ask for the
# same dword share it. The cost of a group is the largest number of different dwords that one bank has to
# give.

BANKS = 64
_known: dict[tuple[int, bytes], int] = {}
_REMEMBERED = 4096


def extra_cycles(addresses: npt.NDArray[np.int64], lanes: npt.NDArray[np.intp], size: int) -> int:
    """Passes beyond the conflict-free ones, for ``size`` bytes (4, 8, 12 or 16) at the addresses of the
    active lanes."""
    relative = addresses - int(addresses[0])  # moving all addresses alike only rotates the banks
    key = (size, relative.tobytes() + lanes.tobytes())
    found = _known.get(key)
    if found is None:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        found = _known[key] = _count(relative >> 2, lanes, max(size // 4, 1))
    return found


def _count(dwords: npt.NDArray[np.int64], lanes: npt.NDArray[np.intp], width: int) -> int:
    group_lanes = BANKS // width if width != 3 else BANKS // 4
    extra = 0
    for group in np.unique(lanes // group_lanes):
        wanted = np.unique(dwords[lanes // group_lanes == group][:, None] + np.arange(width))
        extra += int(np.bincount(wanted % BANKS, minlength=BANKS).max()) - 1
    return extra


# ---- Reads, writes and lane exchanges ----

_BYTES = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1, "u16": 2, "b8": 1, "b16": 2}
_ALIGN = {12: 16}
Addresses = npt.NDArray[np.int64]


def _offsets(form: Form, size: int) -> tuple[int, ...]:
    """Byte offsets of the one or two accesses of an instruction."""
    match = re.match(r"ds_(?:read|write)2(st64)?_", form.mnemonic)
    if match is None:
        offset = form.number("offset")
        if not 0 <= offset < 1 << 16:
            raise UnsupportedInstructionError(f"offset:{offset}: an LDS offset has 16 bits")
        return (offset,)
    step = size * (64 if match[1] else 1)
    pair = (form.number("offset0"), form.number("offset1"))
    if not all(0 <= offset < 256 for offset in pair):
        raise UnsupportedInstructionError(f"offsets {pair}: an LDS offset of a pair has 8 bits")
    return (pair[0] * step, pair[1] * step)


def _count_conflicts(
    wave: Wave, line: int, addresses: Addresses, lanes: npt.NDArray[np.intp], size: int
) -> None:
    conflicts = wave.machine.bank_conflicts
    if conflicts is not None:
        seen, extra = conflicts.get(line, (0, 0))
        conflicts[line] = (seen + 1, extra + extra_cycles(addresses, lanes, size))


def _read(form: Form) -> Step:
    size = _BYTES[form.mnemonic.rsplit("_", 1)[1]]
    offsets = _offsets(form, size)
    dwords = max(size // 4, 1)
    destination, address = form.operands(2)
    first = form.vector(destination, dwords * len(offsets), accumulator=None)
    source = form.address(address, "u")
    registers = tuple(range(first, first + dwords * len(offsets)))
    align, line = _ALIGN.get(size, size), form.line

    def step(wave: Wave) -> None:
        base = each_lane(source(wave)).astype(np.int64)
        wave.refuse_in_flight(first, len(registers))
        lanes = wave.active()
        lds = wave.lds
        touched: list[npt.NDArray[np.int64]] = []
        undefined: npt.NDArray[np.bool_] | None = None
        rows: list[npt.NDArray[np.uint32]] = []
        if lanes.size:
            base = base if wave.full else base[lanes]
            for at, offset in enumerate(offsets):
                addresses = (base + offset) & 0xFFFFFFFF  # LLVM folds negative bases
                lds.check_bounds(addresses, size, align, lanes)
                granules = lds.granules(addresses, size)
                lds.mark_read(wave.index, granules)
                touched.append(granules)
                _count_conflicts(wave, line, addresses, lanes, size)
                rows.append(lds.words.take(granules) if lds.granule == 4 else _gather(lds, addresses, size))
                known = lds.defined.take(granules)
                if not known.all():
                    if undefined is None:
                        undefined = np.zeros((len(registers), 64), np.bool_)
                    lost = ~known.reshape(dwords, -1, lanes.size).all(axis=1)
                    undefined[at * dwords : (at + 1) * dwords, lanes] = lost
            values = np.concatenate(rows) if len(rows) > 1 else rows[0]
            if wave.full:
                wave.vectors[first : first + len(registers)] = values
            else:
                wave.vectors[first : first + len(registers), lanes] = values
        states = wave.load_states(first, len(registers), None if undefined is None else ~undefined)
        flight = Flight(line, vectors=registers, vector_states=states, lds_granules=_joined(touched))
        wave.depart(flight)
        wave.counters.lds.append(flight)

    return step


def _gather(lds: Lds, addresses: Addresses, size: int) -> npt.NDArray[np.uint32]:
    values: npt.NDArray[np.uint32]
    if size >= 4:
        values = lds.words.take(cells(addresses >> 2, size // 4))
    else:
        parts = lds.bytes[cells(addresses, size)].astype(np.uint32)
        values = (parts[0] if size == 1 else parts[0] | parts[1] << np.uint32(8))[None, :]
    return values


def _write(form: Form) -> Step:
    size = _BYTES[form.mnemonic.rsplit("_", 1)[1]]
    offsets = _offsets(form, size)
    dwords = max(size // 4, 1)
    operands = form.operands(1 + len(offsets))
    source = form.address(operands[0], "u")
    parts = [form.vector(operand, dwords, accumulator=None) for operand in operands[1:]]
    align, line = _ALIGN.get(size, size), form.line

    def step(wave: Wave) -> None:
        base = each_lane(source(wave)).astype(np.int64)
        for first in parts:
            for register in range(first, first + dwords):
                if wave.vector_states[register]:
                    wave.require(register, wave.lanes)
        lanes = wave.active()
        touched: list[npt.NDArray[np.int64]] = []
        if lanes.size:
            base = base if wave.full else base[lanes]
            for first, offset in zip(parts, offsets, strict=True):
                addresses = (base + offset) & 0xFFFFFFFF  # LLVM folds negative bases
                wave.lds.check_bounds(addresses, size, align, lanes)
                granules = wave.lds.granules(addresses, size)
                wave.lds.mark_write(wave.index, granules)
                touched.append(granules)
                _count_conflicts(wave, line, addresses, lanes, size)
                scatter(wave, addresses, size, wave.vectors[first : first + dwords, lanes])
                wave.lds.defined[granules] = True
        flight = Flight(line, lds_granules=_joined(touched), lds_write=True)
        wave.counters.lds.append(flight)

    return step


def scatter(wave: Wave, addresses: Addresses, size: int, values: npt.NDArray[np.uint32]) -> None:
    """Writes ``[dwords, n]`` values to LDS; two lanes may share a byte only if they agree on it."""
    lds = wave.lds
    if size >= 4:
        places = cells(addresses >> 2, size // 4)
        lds.words[places] = values
        kept = bool((lds.words.take(places) == values).all())
    else:
        places = cells(addresses, size)
        wanted = np.ascontiguousarray(values[0]).view(np.uint8).reshape(-1, 4)[:, :size].T
        lds.bytes[places] = wanted
        kept = np.array_equal(lds.bytes[places], wanted)
    if not kept:
        raise RaceError("two lanes of one LDS write put different values into the same byte")


def _joined(granules: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64] | None:
    if not granules:
        return None
    return granules[0] if len(granules) == 1 else np.concatenate(granules, axis=1)


def _permute(form: Form) -> Step:
    """ds_bpermute_b32 (pull) and ds_permute_b32 (push): lanes exchange values; LDS itself is not touched."""
    destination, address, operand = form.operands(3)
    register, where, data = form.vector(destination), form.address(address, "u"), form.source(operand, "u")
    (offset,), line, pulls = _offsets(form, 4), form.line, form.mnemonic == "ds_bpermute_b32"

    def step(wave: Wave) -> None:
        wave.refuse_in_flight(register, 1)
        if not wave.full:
            raise UnsupportedInstructionError(f"{form.mnemonic} with inactive lanes")
        lanes = ((each_lane(where(wave)).astype(np.int64) + offset) >> 2) & 63
        values = np.array(each_lane(data(wave)), np.uint32)
        if pulls:
            result = values[lanes]
        else:
            result = np.zeros(64, np.uint32)
            result[lanes] = values
            if not np.array_equal(result[lanes], values):
                raise UnsupportedInstructionError("ds_permute_b32 of two lanes to one")
        wave.u32[register][:] = result
        flight = Flight(line, vectors=(register,), vector_states=wave.load_states(register, 1, None))
        wave.depart(flight)
        wave.counters.lds.append(flight)

    return step


# ---- The table's rows ----

_row = partial(
    Row, destinations=0, keeps=False, writes_exec=False, sets_scc=False, falls_through=True, suffixes=(),
    rule=table.lds, wide=(), hazard="none",
)  # fmt: skip
_read_row = partial(_row, build=_read, kind="lds_read", destinations=1)
_write_row = partial(_row, build=_write, kind="lds_write")


def _rows() -> Iterator[Row]:
    for width in ("b32", "b64", "b96", "b128", "u8", "u16"):
        yield _read_row(f"ds_read_{width}", lane_bytes=_BYTES[width])
    for width in ("b32", "b64", "b96", "b128", "b8", "b16"):
        yield _write_row(f"ds_write_{width}", lane_bytes=_BYTES[width])
    for pair in ("2", "2st64"):
        for width in ("b32", "b64"):
            yield _read_row(f"ds_read{pair}_{width}", lane_bytes=2 * _BYTES[width])
            yield _write_row(f"ds_write{pair}_{width}", lane_bytes=2 * _BYTES[width])
    for name in ("ds_bpermute_b32", "ds_permute_b32"):
        yield _read_row(name, build=_permute, lane_bytes=0)


ROWS = tuple(_rows())
