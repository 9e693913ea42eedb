"""Vector loads and stores of global memory and scratch, and DMA from global memory to LDS. ``vmcnt`` counts them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel.gfx950.counters import Flight
from kernel.gfx950.errors import MissingWaitError, OutOfBoundsError, UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.instructions.lds_access import scatter
from kernel.gfx950.machine import Request
from kernel.gfx950.operands import M0, Operand
from kernel.gfx950.wave import Wave

_BYTES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
    "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "byte": 1, "short": 2,
}  # fmt: skip
_SIGNED = {"sbyte": 8, "sshort": 16}


@dataclass(frozen=True)
class Target:
    """Where an instruction goes: the lanes that access memory, and their byte addresses."""

    lanes: npt.NDArray[np.intp]
    addresses: npt.NDArray[np.int64]


AddressSource = Callable[[Wave], Target]


def _size(form: Form) -> int:
    return _BYTES[form.mnemonic.rsplit("_", 1)[1]]


# -- addresses


def _buffer_address(form: Form, address: Operand, resource: Operand, scalar_offset: Operand, size: int) -> AddressSource:
    """Raw buffers: stride 0. What begins at or after ``num_records`` is not accessed (loads give 0)."""
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
    elif address.kind == "off" or address.is_register:
        per_lane = _no_lane_offset
    else:
        raise UnsupportedInstructionError(f"operand {address.text} is no buffer address")

    def find(wave: Wave) -> Target:
        base = wave.scalar64(descriptor)
        records, flags = wave.scalar(descriptor + 2), wave.scalar(descriptor + 3)
        if base >> 48 or flags & 1 << 23:
            raise UnsupportedInstructionError("a buffer with a stride, a swizzle or the lane's number in its address")
        moved = soffset(wave)
        offsets = np.broadcast_to(per_lane(wave), 64).astype(np.int64) + constant
        lanes = np.flatnonzero(wave.lanes & (offsets + moved < records))
        inside = offsets[lanes]
        if lanes.size and int(inside.max()) + moved + size > records:
            at = int(np.argmax(inside + moved + size > records))
            raise UnsupportedInstructionError(
                f"{size} bytes at offset {int(inside[at]) + moved} of a buffer of {records}: an access across its end",
                lane=int(lanes[at]),
            )
        return Target(lanes, inside + (base + moved))

    return find


def _no_lane_offset(wave: Wave) -> np.uint32:
    return np.uint32(0)


def _global_address(form: Form, address: Operand, base: Operand) -> AddressSource:
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
    lanes = np.flatnonzero(wave.lanes)
    return Target(lanes, addresses[lanes])


# -- loads, stores, DMA


def _load(form: Form, destination: Operand, find: AddressSource) -> Step:
    kind = form.mnemonic.rsplit("_", 1)[1]
    size, signed = _BYTES[kind], _SIGNED.get(kind)
    count = max(size // 4, 1)
    first = form.vector(destination, count, accumulator=None)
    registers, line = tuple(range(first, first + count)), form.line

    def step(wave: Wave) -> None:
        target = find(wave)
        wave.refuse_in_flight(first, count)
        request = Request(wave.index, wave.epoch, line)
        result = np.zeros((count, 64), np.uint32)
        defined: npt.NDArray[np.bool_] | None = None
        if target.lanes.size:
            values, known = wave.machine.load(target.addresses, size, target.lanes, request)
            if signed is not None:
                sign = np.uint32(1 << (signed - 1))
                values = (values ^ sign) - sign
            result[:, target.lanes] = values
            if known is not None:
                defined = np.ones((count, 64), np.bool_)
                defined[:, target.lanes] = known
        if wave.full:
            wave.vectors[first : first + count] = result
        else:
            wave.vectors[first : first + count, wave.lanes] = result[:, wave.lanes]
        states = wave.load_states(first, count, defined)
        flight = Flight(line, vectors=registers, vector_states=states, accesses=request.accesses)
        wave.depart(flight)
        wave.counters.vector_memory.append(flight)

    return step


def _store(form: Form, operand: Operand, find: AddressSource) -> Step:
    """The data is read at the issue; when it lands is told by the race rules."""
    size = _size(form)
    count = max(size // 4, 1)
    first, line = form.vector(operand, count, accumulator=None), form.line

    def step(wave: Wave) -> None:
        target = find(wave)
        written: npt.NDArray[np.bool_] = np.zeros(64, np.bool_)
        written[target.lanes] = True
        for register in range(first, first + count):
            if wave.vector_states[register]:
                wave.require(register, written)
        request = Request(wave.index, wave.epoch, line)
        if target.lanes.size:
            values = wave.vectors[first : first + count, target.lanes]
            wave.machine.store(target.addresses, size, target.lanes, values, request)
        wave.counters.vector_memory.append(Flight(line, accesses=request.accesses))

    return step


def _dma(form: Form, find: AddressSource, size: int, lds_offset: int) -> Step:
    """Global memory to LDS: lane l writes at ``m0 + offset + l * size``; lanes beyond the buffer write 0."""
    line = form.line

    def step(wave: Wave) -> None:
        target = find(wave)
        start = wave.scalar(M0) + lds_offset
        active = np.flatnonzero(wave.lanes)
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
            raise MissingWaitError(f"a DMA overwrites LDS bytes that line {flight.line} may still be accessing")


# -- the instructions


def _buffer(form: Form) -> Step:
    form.cache_policy()
    size = _size(form)
    if form.flag("lds"):
        if form.mnemonic not in ("buffer_load_dword", "buffer_load_dwordx3", "buffer_load_dwordx4"):
            raise UnsupportedInstructionError(f"{form.mnemonic} to LDS")
        address, resource, scalar_offset = form.operands(3)
        offset = form.instruction.modifiers.get("offset", 0)
        find = _buffer_address(form, address, resource, scalar_offset, size)
        return _dma(form, find, size, int(offset) if isinstance(offset, int) else 0)
    register, address, resource, scalar_offset = form.operands(4)
    find = _buffer_address(form, address, resource, scalar_offset, size)
    return (_store if "_store_" in form.mnemonic else _load)(form, register, find)


def _global(form: Form) -> Step:
    form.cache_policy()
    first, second, base = form.operands(3)
    if "_store_" in form.mnemonic:
        return _store(form, second, _global_address(form, first, base))
    return _load(form, first, _global_address(form, second, base))


def _global_dma(form: Form) -> Step:
    form.cache_policy()
    address, base = form.operands(2)
    offset = form.instruction.modifiers.get("offset", 0)
    find = _global_address(form, address, base)
    return _dma(form, find, _size(form), int(offset) if isinstance(offset, int) else 0)


def _scratch(form: Form) -> Step:
    """Private memory of a lane. The addresses here are constants or scalars: a lane's own offset is refused."""
    form.cache_policy()
    stores = "_store_" in form.mnemonic
    first, second, base = form.operands(3)
    address, register_operand = (first, second) if stores else (second, first)
    if address.kind != "off" or form.mnemonic.rsplit("_", 1)[1] not in ("dword", "dwordx2", "dwordx3", "dwordx4"):
        raise UnsupportedInstructionError(f"{form.mnemonic} with operand {address.text}")
    start = (lambda wave: 0) if base.kind == "off" else form.scalar_source(base)
    offset, line, count = form.number("offset"), form.line, _size(form) // 4
    register = form.vector(register_operand, count, accumulator=None)
    registers = tuple(range(register, register + count))

    def place(wave: Wave) -> int:
        at = start(wave) + offset
        if at % 4 or at < 0 or at // 4 + count > wave.scratch.shape[0]:
            raise OutOfBoundsError(f"{4 * count} bytes of scratch at {at}: a lane has {4 * wave.scratch.shape[0]}")
        return at // 4

    def store(wave: Wave) -> None:
        at = place(wave)
        for number, source in enumerate(registers):
            if wave.vector_states[source]:
                known = wave.definedness(source)  # a spilled register may hold undefined lanes
                np.copyto(wave.scratch_defined[at + number], known, where=wave.lanes)
            else:
                wave.scratch_defined[at + number] |= wave.lanes
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


def _builders() -> dict[str, Builder]:
    loads = ("dword", "dwordx2", "dwordx3", "dwordx4", "ubyte", "sbyte", "ushort", "sshort")
    stores = ("dword", "dwordx2", "dwordx3", "dwordx4", "byte", "short")
    found: dict[str, Builder] = {}
    for head, builder in (("buffer", _buffer), ("global", _global), ("scratch", _scratch)):
        found |= {f"{head}_load_{width}": builder for width in loads}
        found |= {f"{head}_store_{width}": builder for width in stores}
    found |= {f"global_load_lds_{width}": _global_dma for width in ("dword", "dwordx3", "dwordx4")}
    return found


BUILDERS = _builders()
