"""Loads and stores of global memory and scratch, DMA from global memory to LDS, and scalar loads.

``vmcnt`` counts all but the scalar loads, which ``lgkmcnt`` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import MissingWaitError, OutOfBoundsError, UnsupportedInstructionError
from kernel.gfx950.isa import table
from kernel.gfx950.isa.form import Builder, Form, IntegerSource, Step
from kernel.gfx950.isa.lds import scatter
from kernel.gfx950.isa.table import Row, Rule
from kernel.gfx950.memory import Request
from kernel.gfx950.program import M0, Operand
from kernel.gfx950.wave import ALL_ACTIVE, DEFINED, IN_FLIGHT, UNDEFINED, Flight, Wave, each_lane

# ---- Addresses of the active lanes ----


@dataclass(eq=False, slots=True)
class Target:
    """Where an instruction goes: the lanes that access memory, and their byte addresses."""

    lanes: npt.NDArray[np.intp]
    addresses: npt.NDArray[np.int64]
    dwords: npt.NDArray[np.int64] | None = None
    """Of a load that the end of a buffer cuts: how many of each lane's dwords lie inside."""


AddressSource = Callable[[Wave], Target]


_FORMAT_32 = 4
"""A descriptor's data format that LLVM sets for raw buffers: one of 0 is invalid."""


def buffer_address(
    form: Form, address: Operand, resource: Operand, scalar_offset: Operand, size: int, *, cut: bool = False
) -> AddressSource:
    """Raw buffers: stride 0. What begins at or after ``num_records`` is not accessed (loads give 0).

    The hardware checks each dword of a longer access by itself. With ``cut`` an access of aligned dwords may
    therefore cross the end (LLVM AMDGPU guide, "Relaxed Buffer OOB Mode"); every other crossing is refused.
    """
    if form.flag("idxen"):
        raise UnsupportedInstructionError("buffer access with idxen")
    if resource.kind != "scalar" or resource.count != 4 or resource.modified:
        raise UnsupportedInstructionError(f"operand {resource.text} is no buffer descriptor")
    descriptor, constant = resource.index, form.number("offset")
    if not 0 <= constant < 4096:
        raise UnsupportedInstructionError(f"offset:{constant}: a buffer offset has 12 bits")
    soffset = form.scalar_source(scalar_offset)
    if form.flag("offen"):
        per_lane = form.address(address, "u")
    elif address.kind == "off":
        per_lane = _no_lane_offset
    else:
        raise UnsupportedInstructionError(f"operand {address.text} is no buffer address")

    def find(wave: Wave) -> Target:
        base = wave.scalar64(descriptor)
        records, flags = wave.scalar(descriptor + 2), wave.scalar(descriptor + 3)
        if base >> 48 or flags & 1 << 23:
            raise UnsupportedInstructionError(
                "a buffer with a stride, a swizzle or the lane's number in its address"
            )
        if flags >> 15 & 15 != _FORMAT_32:
            raise UnsupportedInstructionError(f"a buffer of data format {flags >> 15 & 15}, not of dwords")
        offsets = each_lane(per_lane(wave)).astype(np.int64) + (constant + soffset(wave))
        if wave.full and int(offsets.max()) + size <= records:
            return Target(ALL_ACTIVE, offsets + base)
        lanes = np.flatnonzero(wave.lanes & (offsets < records))
        inside = offsets[lanes]
        if lanes.size and int(inside.max()) + size > records:
            if cut and not (records % 4 or np.any(inside % 4)):
                return Target(lanes, inside + base, np.minimum((records - inside) // 4, size // 4))
            at = int(np.argmax(inside + size > records))
            raise UnsupportedInstructionError(
                f"{size} bytes at offset {int(inside[at])} cross the end of a buffer of {records}",
                lane=int(lanes[at]),
            )
        return Target(lanes, inside + base)

    return find


def _no_lane_offset(_wave: Wave) -> np.uint32:
    zero: np.uint32 = np.uint32(0)
    return zero


def global_address(form: Form, address: Operand, base: Operand) -> AddressSource:
    """A 64-bit address a lane, or a scalar base and an unsigned 32-bit offset a lane."""
    constant = form.number("offset")
    if not -4096 <= constant < 4096:
        raise UnsupportedInstructionError(f"offset:{constant}: a global offset has 13 bits")
    if base.kind == "off":
        pair = form.address(address, "U")
        if address.kind != "vector":
            raise UnsupportedInstructionError(f"operand {address.text} is no vector address")
        return lambda wave: _active(wave, pair(wave).view(np.int64) + constant)
    start, per_lane = form.scalar_source64(base), form.address(address, "u")
    if address.kind != "vector" or base.kind != "scalar":
        raise UnsupportedInstructionError(f"operands {address.text}, {base.text} are no global address")
    return lambda wave: _active(wave, per_lane(wave).astype(np.int64) + (start(wave) + constant))


def _active(wave: Wave, addresses: npt.NDArray[np.int64]) -> Target:
    if wave.full:
        return Target(ALL_ACTIVE, addresses)
    lanes = wave.active()
    return Target(lanes, addresses[lanes])


_BYTES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
    "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "byte": 1, "short": 2,
}  # fmt: skip
_SIGNED = {"sbyte": 8, "sshort": 16}


def _size(form: Form) -> int:
    return _BYTES[form.mnemonic.rsplit("_", 1)[1]]


def _load(form: Form, destination: Operand, find: AddressSource) -> Step:
    kind = form.mnemonic.rsplit("_", 1)[1]
    size, signed = _BYTES[kind], _SIGNED.get(kind)
    count = max(size // 4, 1)
    first = form.vector(destination, count, accumulator=None)
    registers, line = tuple(range(first, first + count)), form.line

    def step(wave: Wave) -> None:
        target = find(wave)
        wave.supersede_loads(first, count)
        request = Request(wave.index, wave.epoch, line)
        defined: npt.NDArray[np.bool_] | None = None
        if target.lanes.size:
            result, known = _read(wave, target, size, request)
            if signed is not None:
                sign = np.uint32(1 << (signed - 1))
                result = (result ^ sign) - sign
            if target.lanes.size < 64:
                values, result = result, np.zeros((count, 64), np.uint32)
                result[:, target.lanes] = values
            if known is not None:
                defined = np.ones((count, 64), np.bool_)
                defined[:, target.lanes] = known
        else:
            result = np.zeros((count, 64), np.uint32)
        if wave.full:
            wave.vectors[first : first + count] = result
        else:
            wave.vectors[first : first + count, wave.lanes] = result[:, wave.lanes]
        states = wave.load_states(first, count, defined)
        flight = Flight(line, vectors=registers, vector_states=states, accesses=request.accesses)
        wave.depart(flight)
        wave.counters.vector_memory.append(flight)

    return step


def _read(
    wave: Wave, target: Target, size: int, request: Request
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_] | None]:
    """As ``Machine.load``; of a load that a buffer's end cuts, the dwords past it are 0."""
    if target.dwords is None:
        return wave.machine.load(target.addresses, size, target.lanes, request)
    values = np.zeros((size // 4, target.lanes.size), np.uint32)
    known = np.ones(values.shape, np.bool_)
    for at in range(int(target.dwords.max())):
        inside = target.dwords > at
        addresses, lanes = target.addresses[inside] + 4 * at, target.lanes[inside]
        found, defined = wave.machine.load(addresses, 4, lanes, request)
        values[at, inside] = found[0]
        if defined is not None:
            known[at, inside] = defined[0]
    return values, None if known.all() else known


def _store(form: Form, operand: Operand, find: AddressSource) -> Step:
    """The data is read at the issue; when it lands is told by the race rules."""
    size = _size(form)
    count = max(size // 4, 1)
    first, line = form.vector(operand, count, accumulator=None), form.line

    def step(wave: Wave) -> None:
        target = find(wave)
        for register in range(first, first + count):
            if wave.vector_states[register]:
                written: npt.NDArray[np.bool_] = np.zeros(64, np.bool_)
                written[target.lanes] = True
                wave.require(register, written)
        request = Request(wave.index, wave.epoch, line)
        if target.lanes.size:
            values = wave.vectors[first : first + count, target.lanes]
            wave.machine.store(target.addresses, size, target.lanes, values, request)
        wave.counters.vector_memory.append(Flight(line, accesses=request.accesses))

    return step


def _dma(form: Form, find: AddressSource) -> Step:
    """Global memory to LDS: lane l writes at ``m0 + offset + l * size``; lanes beyond the buffer write 0."""
    size, line = _size(form), form.line
    lds_offset = int(str(form.instruction.modifiers.get("offset", 0)))

    def step(wave: Wave) -> None:
        target = find(wave)
        start = wave.scalar(M0) + lds_offset
        active = wave.active()
        flight = Flight(line, dma=True, lds_write=True)
        wave.counters.vector_memory.append(flight)
        if not active.size:
            return
        places = start + active.astype(np.int64) * size
        wave.lds.check_bounds(places, size, 4, active)
        granules = wave.lds.granules(places, size)
        _refuse_own_lds(wave, granules)
        wave.lds.mark_write(wave.index, granules)
        wave.lds.begin_dma(granules)
        request = Request(wave.index, wave.epoch, line)
        values = np.zeros((size // 4, 64), np.uint32)
        if target.lanes.size:
            loaded, known = wave.machine.load(target.addresses, size, target.lanes, request)
            if known is not None:
                raise OutOfBoundsError("a DMA of global bytes that nothing wrote")
            values[:, target.lanes] = loaded

        def land() -> None:
            scatter(wave, places, size, values[:, active])

        def finish() -> None:
            if wave.machine.schedule.dma == "late":
                land()
            wave.lds.defined[granules] = True
            wave.lds.end_dma(granules)

        if wave.machine.schedule.dma == "early":
            land()
        flight.lds_granules, flight.accesses, flight.finish = granules, request.accesses, finish

    return step


def _refuse_own_lds(wave: Wave, granules: npt.NDArray[np.int64]) -> None:
    for flight in wave.counters.lds:
        if flight.lds_granules is not None and np.intersect1d(flight.lds_granules, granules).size:
            raise MissingWaitError(
                f"a DMA overwrites LDS bytes that line {flight.line} may still be accessing"
            )


def _buffer(form: Form) -> Step:
    form.cache_policy()
    size = _size(form)
    if form.flag("lds"):
        if form.mnemonic not in ("buffer_load_dword", "buffer_load_dwordx3", "buffer_load_dwordx4"):
            raise UnsupportedInstructionError(f"{form.mnemonic} to LDS")
        address, resource, scalar_offset = form.operands(3)
        return _dma(form, buffer_address(form, address, resource, scalar_offset, size))
    register, address, resource, scalar_offset = form.operands(4)
    loads = "_store_" not in form.mnemonic
    find = buffer_address(form, address, resource, scalar_offset, size, cut=loads and size % 4 == 0)
    return (_load if loads else _store)(form, register, find)


def _global(form: Form) -> Step:
    form.cache_policy()
    first, second, base = form.operands(3)
    if "_store_" in form.mnemonic:
        return _store(form, second, global_address(form, first, base))
    return _load(form, first, global_address(form, second, base))


def _global_dma(form: Form) -> Step:
    form.cache_policy()
    address, base = form.operands(2)
    return _dma(form, global_address(form, address, base))


# ---- Scratch: private memory of a lane, mostly spilled registers ----


def _scratch(form: Form) -> Step:
    """Private memory of a lane. The addresses here are constants or scalars: a lane's own offset is
    refused."""
    form.cache_policy()
    stores = "_store_" in form.mnemonic
    first, second, base = form.operands(3)
    address, register_operand = (first, second) if stores else (second, first)
    if address.kind != "off":
        raise UnsupportedInstructionError(f"{form.mnemonic} with operand {address.text}")
    start = (lambda _wave: 0) if base.kind == "off" else form.scalar_source(base)
    offset, line, count = form.number("offset"), form.line, _size(form) // 4
    if not -4096 <= offset < 4096:
        raise UnsupportedInstructionError(f"offset:{offset}: a scratch offset has 13 bits")
    register = form.vector(register_operand, count, accumulator=None)
    registers = tuple(range(register, register + count))

    def place(wave: Wave) -> int:
        at = start(wave) + offset
        if at % 4 or at < 0 or at // 4 + count > wave.scratch.shape[0]:
            raise OutOfBoundsError(
                f"{4 * count} bytes of scratch at {at}: a lane has {4 * wave.scratch.shape[0]}"
            )
        return at // 4

    def store(wave: Wave) -> None:
        at = place(wave)
        for number, source in enumerate(registers):
            known = wave.definedness(source)  # a spilled register may hold undefined lanes
            np.copyto(wave.scratch_defined[at + number], True if known is None else known, where=wave.lanes)
            np.copyto(wave.scratch[at + number], wave.u32[source], where=wave.lanes)
        wave.counters.vector_memory.append(Flight(line))

    def load(wave: Wave) -> None:
        at = place(wave)
        wave.refuse_in_flight(register, count)
        for number, destination in enumerate(registers):
            np.copyto(wave.u32[destination], wave.scratch[at + number], where=wave.lanes)
        states = wave.load_states(register, count, wave.scratch_defined[at : at + count])
        flight = Flight(line, vectors=registers, vector_states=states)
        wave.depart(flight)
        wave.counters.vector_memory.append(flight)

    return store if stores else load


# ---- Scalar loads. They return in any order, so only ``lgkmcnt(0)`` covers one ----

_SCALAR_DWORDS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def _scalar_load(form: Form) -> Step:
    buffer = form.mnemonic.startswith("s_buffer_load")
    count = _SCALAR_DWORDS[form.mnemonic.rsplit("_", 1)[1]]
    destination, base, offset_operand = form.operands(3)
    first = form.scalar_destination(destination, count)
    if base.kind != "scalar" or base.count != (4 if buffer else 2) or base.modified:
        raise UnsupportedInstructionError(f"operand {base.text} is no base of a scalar load")
    base_register = base.index
    offset: IntegerSource = form.scalar_source(offset_operand)
    extra = form.number("offset")
    if offset_operand.is_constant and extra:
        raise UnsupportedInstructionError("a scalar load with two constant offsets")
    signed = offset_operand.is_constant and not buffer  # 21 bits, sign-extended
    constant = int(offset_operand.number) if signed else 0
    registers = tuple(range(first, first + count))
    line = form.line

    def step(wave: Wave) -> None:
        start = wave.scalar64(base_register)
        at = (constant if signed else offset(wave)) + extra
        limit = None
        if buffer:
            start, limit = _scalar_buffer(wave, base_register)
        for register in registers:
            if wave.scalar_states[register] == IN_FLIGHT:
                wave.scalar(register)
        address = start + at
        if address & 3:
            raise OutOfBoundsError(f"scalar load at {address:#x}, which is not a multiple of 4")
        inside = count if limit is None else max(0, min(count, (limit - at) // 4))
        states = [DEFINED] * count
        request = Request(wave.index, wave.epoch, line, scalar=True)
        for register in registers:
            wave.scalars[register] = 0  # what a buffer load gives beyond the end of its buffer
        if inside:
            values, defined = wave.machine.load_scalars(address, inside, request)
            wave.scalars[first : first + inside] = values
            for at_dword in range(inside if defined is not None else 0):
                if defined is not None and not defined[at_dword]:
                    states[at_dword] = UNDEFINED
                    wave.scalar_undefined[first + at_dword] = 0xFFFFFFFF
        flight = Flight(line, scalars=registers, scalar_states=tuple(states), accesses=request.accesses)
        wave.depart(flight)
        wave.counters.scalar.append(flight)

    return step


def _scalar_buffer(wave: Wave, register: int) -> tuple[int, int]:
    """Base address and bytes of the raw buffer that the four scalars at ``register`` describe."""
    base = wave.scalar64(register)
    if base >> 48 & 0x3FFF:
        raise UnsupportedInstructionError("a scalar load from a buffer with a stride")
    return base & 0xFFFFFFFFFFFF, wave.scalar(register + 2)


# ---- The table's rows ----

_row = partial(
    Row,
    keeps=False,
    writes_exec=False,
    sets_scc=False,
    falls_through=True,
    suffixes=(),
    wide=(),
    hazard="none",
)
_load_row = partial(_row, kind="vmem_load", destinations=1)
_store_row = partial(_row, kind="vmem_store", destinations=0)


def _rows() -> Iterator[Row]:
    families: tuple[tuple[str, Builder, Rule], ...] = (
        ("buffer", _buffer, table.buffer), ("global", _global, table.flat)
    )  # fmt: skip
    for head, build, rule in families:
        for width in ("dword", "dwordx2", "dwordx3", "dwordx4", "ubyte", "sbyte", "ushort", "sshort"):
            yield _load_row(f"{head}_load_{width}", build=build, rule=rule, lane_bytes=_BYTES[width])
        for width in ("dword", "dwordx2", "dwordx3", "dwordx4", "byte", "short"):
            yield _store_row(f"{head}_store_{width}", build=build, rule=rule, lane_bytes=_BYTES[width])
    for width in ("dword", "dwordx3", "dwordx4"):
        dma = partial(_load_row, build=_global_dma, destinations=0, rule=table.flat)
        yield dma(f"global_load_lds_{width}", lane_bytes=_BYTES[width])
    for width in ("dword", "dwordx2", "dwordx3", "dwordx4"):
        private = partial(_row, build=_scratch, rule=table.scratch, lane_bytes=_BYTES[width])
        yield private(f"scratch_load_{width}", kind="vmem_load", destinations=1)
        yield private(f"scratch_store_{width}", kind="vmem_store", destinations=0)
    for head, low in (("s_load", -(1 << 20)), ("s_buffer_load", 0)):
        for width in _SCALAR_DWORDS:
            rule = partial(table.scalar_load, low=low)
            scalar = partial(_row, build=_scalar_load, kind="smem", destinations=1, lane_bytes=0)
            yield scalar(f"{head}_{width}", rule=rule)


ROWS = tuple(_rows())
