"""Vector loads and stores of global memory and scratch, and DMA from global memory to LDS. ``vmcnt`` counts
them all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel.gfx950.counters import Flight
from kernel.gfx950.errors import MissingWaitError, OutOfBoundsError, UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.instructions.addresses import AddressSource, Target, buffer_address, global_address
from kernel.gfx950.instructions.lds_access import scatter
from kernel.gfx950.machine import Request
from kernel.gfx950.operands import M0, Operand
from kernel.gfx950.wave import Wave

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
        result = np.zeros((count, 64), np.uint32)
        defined: npt.NDArray[np.bool_] | None = None
        if target.lanes.size:
            values, known = _read(wave, target, size, request)
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
        offset = form.instruction.modifiers.get("offset", 0)
        find = buffer_address(form, address, resource, scalar_offset, size)
        return _dma(form, find, size, int(offset) if isinstance(offset, int) else 0)
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
    offset = form.instruction.modifiers.get("offset", 0)
    find = global_address(form, address, base)
    return _dma(form, find, _size(form), int(offset) if isinstance(offset, int) else 0)


def _builders() -> dict[str, Builder]:
    loads = ("dword", "dwordx2", "dwordx3", "dwordx4", "ubyte", "sbyte", "ushort", "sshort")
    stores = ("dword", "dwordx2", "dwordx3", "dwordx4", "byte", "short")
    found: dict[str, Builder] = {}
    for head, builder in (("buffer", _buffer), ("global", _global)):
        found |= {f"{head}_load_{width}": builder for width in loads}
        found |= {f"{head}_store_{width}": builder for width in stores}
    found |= {f"global_load_lds_{width}": _global_dma for width in ("dword", "dwordx3", "dwordx4")}
    return found


BUILDERS = _builders()
