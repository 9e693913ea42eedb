"""The state of one wave: 64 lanes of vector registers, scalar registers, masks, and what is defined of them.

A register is in one of three states. DEFINED: its value may be used. UNDEFINED: some of its lanes (of a
scalar register: some of its bits) were never written or were computed from such. IN_FLIGHT: a memory
operation will write it; touching it before the covering ``s_waitcnt`` raises.

Undefined lanes may be moved and computed with, lane by lane, because compiled code does so in lanes whose
result is selected away; the result is undefined in those lanes (``taint``). They raise where they would
have an effect: in an address, a branch, exec, scalar arithmetic, a matrix multiplication, a store to LDS or
global memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import (
    MissingWaitError,
    OutOfBoundsError,
    RaceError,
    UndefinedReadError,
    UnsupportedInstructionError,
)
from kernel.gfx950.memory import Access, Machine, cells
from kernel.gfx950.program import ACCUMULATORS, EXEC, M0, VCC

# ---- Register names and lane masks ----

LaneMask = npt.NDArray[np.bool_]

_SCALAR_NAMES = {VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi"}


def vector_name(register: int) -> str:
    return f"v{register}" if register < ACCUMULATORS else f"a{register - ACCUMULATORS}"


def scalar_name(register: int) -> str:
    return _SCALAR_NAMES.get(register, f"s{register}")


def mask_of(value: int) -> LaneMask:
    """64 bools from a 64-bit lane mask."""
    return np.unpackbits(np.frombuffer(value.to_bytes(8, "little"), np.uint8), bitorder="little").view(
        np.bool_
    )


def each_lane(value: Any) -> npt.NDArray[Any]:
    """A numpy value as 64 lanes: one of no dimensions is the same in all."""
    return value if value.ndim else np.full(64, value)


def value_of(mask: LaneMask) -> int:
    """The 64-bit lane mask of 64 bools."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


# ---- LDS of one workgroup ----
#
# Tracking is done a granule at a time: 4 bytes where every LDS access of the kernel is whole aligned dwords,
# else 1. An operation counts as happening anywhere between its issue and the wait that covers it, so what is
# still in flight at a barrier is marked again behind it.

Granules = npt.NDArray[np.int64]
_NO_WAVE = -1
_MOST_READS = 1024
POISON_BYTE = 0xAD


class Lds:
    """``size`` bytes. Waves are numbered from 0 to 31."""

    def __init__(self, size: int, granule: int) -> None:
        self.size = size
        self.granule = granule
        padded = -(-size // 16) * 16
        self.bytes: npt.NDArray[np.uint8] = np.full(padded, POISON_BYTE, np.uint8)
        self.words: npt.NDArray[np.uint32] = self.bytes.view(np.uint32)
        count = padded // granule
        self._shift = granule.bit_length() - 1
        self.defined: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.writer: npt.NDArray[np.int8] = np.full(count, _NO_WAVE, np.int8)
        self.readers: npt.NDArray[np.uint32] = np.zeros(count, np.uint32)
        self.dma: npt.NDArray[np.int16] = np.zeros(count, np.int16)
        self.dma_flights = 0
        # Waves that wrote and read since the last barrier, a bit each. Most reads meet no other wave's write
        # before the next barrier: they are entered in ``readers`` when one comes.
        self._wrote = self._read = 0
        self._reads: list[tuple[int, Granules]] = []

    def granules(self, addresses: npt.NDArray[np.int64], size: int) -> Granules:
        """Granules of ``size`` bytes at each address, ``[size / granule, lanes]``."""
        return cells(addresses >> self._shift, -(-size >> self._shift))

    def check_bounds(
        self, addresses: npt.NDArray[np.int64], size: int, align: int, lanes: npt.NDArray[np.intp]
    ) -> None:
        """``addresses`` are those of the active ``lanes``, bytes."""
        if int(np.bitwise_or.reduce(addresses)) & (align - 1):
            at = int(np.argmax((addresses & (align - 1)) != 0))
            raise OutOfBoundsError(
                f"LDS address {int(addresses[at]):#x} is not a multiple of {align}", lane=int(lanes[at])
            )
        if int(addresses.min()) < 0 or int(addresses.max()) + size > self.size:
            at = int(np.argmax((addresses < 0) | (addresses + size > self.size)))
            raise OutOfBoundsError(
                f"{size} bytes at LDS address {int(addresses[at]):#x}: the workgroup has {self.size} bytes",
                lane=int(lanes[at]),
            )

    def mark_read(self, wave: int, granules: Granules) -> None:
        self._refuse_written(wave, granules, "reads")
        self._read |= 1 << wave
        self._reads.append((wave, granules))
        if len(self._reads) > _MOST_READS:
            self._enter_reads()
        if self.dma_flights:
            self._refuse_dma(granules)

    def mark_write(self, wave: int, granules: Granules) -> None:
        self._refuse_written(wave, granules, "writes")
        if self._read & ~(1 << wave):
            self._enter_reads()
            others = self.readers[granules] & np.uint32(~(1 << wave) & 0xFFFFFFFF)
            if others.any():
                self._race(wave, granules, others != 0, "writes", "read")
        self.mark_dma(wave, granules)
        if self.dma_flights:
            self._refuse_dma(granules)

    def mark_dma(self, wave: int, granules: Granules) -> None:
        """A DMA still in flight behind a barrier: who reads it needs its wait and one more barrier."""
        self.writer[granules] = wave
        self._wrote |= 1 << wave

    def begin_dma(self, granules: Granules) -> None:
        self.dma[granules] += 1
        self.dma_flights += 1

    def end_dma(self, granules: Granules) -> None:
        self.dma[granules] -= 1
        self.dma_flights -= 1

    def barrier(self) -> None:
        """Forgets who touched what; the caller marks again what is still in flight."""
        self.writer.fill(_NO_WAVE)
        self.readers.fill(0)
        self._wrote = self._read = 0
        self._reads.clear()

    def _enter_reads(self) -> None:
        for wave, granules in self._reads:
            self.readers[granules] |= np.uint32(1 << wave)
        self._reads.clear()

    def _refuse_written(self, wave: int, granules: Granules, what: str) -> None:
        if not self._wrote & ~(1 << wave):
            return
        writer = self.writer.take(granules)
        other = (writer != _NO_WAVE) & (writer != wave)
        if other.any():
            self._race(wave, granules, other, what, "wrote")

    def _refuse_dma(self, granules: Granules) -> None:
        busy = self.dma.take(granules) != 0
        if busy.any():
            at = tuple(np.argwhere(busy)[0])
            raise MissingWaitError(
                f"LDS byte {int(granules[at]) * self.granule:#x} is touched while a DMA to it is in flight: "
                "no s_waitcnt vmcnt covers it"
            )

    def _race(self, wave: int, granules: Granules, bad: npt.NDArray[np.bool_], what: str, did: str) -> None:
        byte = int(granules[tuple(np.argwhere(bad)[0])])
        other = int(self.writer[byte])
        if did == "read":
            other = (int(self.readers[byte]) & ~(1 << wave)).bit_length() - 1
        raise RaceError(
            f"race on LDS byte {byte * self.granule:#x}: wave {wave} {what} what wave {other} {did} "
            "since the last barrier"
        )


# ---- Memory operations in flight, and the ``s_waitcnt`` counters ----
#
# ``vmcnt`` counts loads, stores and DMA to LDS, which finish in order on gfx9. ``lgkmcnt`` counts LDS
# operations, which finish in order among themselves, and scalar loads, which finish in any order: with n
# operations left, a scalar load is certainly over only if n = 0, an LDS operation if at least n later LDS
# operations were issued.


@dataclass(eq=False, slots=True)
class Flight:
    """One operation between its issue and the wait that covers it.

    ``vectors`` and ``scalars`` are the registers it will write, with the state each gets at the end.
    ``lds_granules`` are the LDS granules and ``accesses`` the global ones it touches, ``finish`` what it
    does at the end (DMA landing late).
    """

    line: int
    vectors: tuple[int, ...] = ()
    vector_states: tuple[int, ...] = ()
    scalars: tuple[int, ...] = ()
    scalar_states: tuple[int, ...] = ()
    lds_granules: npt.NDArray[np.int64] | None = None
    lds_write: bool = False
    dma: bool = False
    accesses: tuple[Access, ...] | list[Access] = ()
    finish: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class Counters:
    """What a wave has in flight. ``retire`` is called for each operation that a wait proves to be over."""

    retire: Callable[[Flight], None]
    vector_memory: deque[Flight] = field(default_factory=deque)
    lds: deque[Flight] = field(default_factory=deque)
    scalar: list[Flight] = field(default_factory=list)

    def wait_vector_memory(self, left: int) -> None:
        queue = self.vector_memory
        while len(queue) > left:
            self.retire(queue.popleft())

    def wait_lgkm(self, left: int) -> None:
        queue = self.lds
        while len(queue) > left:
            self.retire(queue.popleft())
        if left == 0 and self.scalar:
            for flight in self.scalar:
                self.retire(flight)
            self.scalar.clear()

    def supersede(self, register: int) -> int | None:
        """Take a vector register from the vector memory load in flight that is to write it.

        Returns the state it would have got, None where no such load is in flight.
        """
        for flight in self.vector_memory:
            if register in flight.vectors:
                at = flight.vectors.index(register)
                state = flight.vector_states[at]
                flight.vectors = flight.vectors[:at] + flight.vectors[at + 1 :]
                flight.vector_states = flight.vector_states[:at] + flight.vector_states[at + 1 :]
                return state
        return None

    def in_flight(self) -> list[Flight]:
        return [*self.vector_memory, *self.lds, *self.scalar]


# ---- The wave ----

LANES = 64
DEFINED, UNDEFINED, IN_FLIGHT = 0, 1, 2
ALL_LANES = (1 << LANES) - 1
EVERY_LANE: LaneMask = np.ones(LANES, np.bool_)
ALL_ACTIVE: npt.NDArray[np.intp] = np.arange(LANES)
POISON = 0x7FC0DEAD
"""A quiet NaN that is easy to recognise, in every register nothing wrote."""

UInt32Array = npt.NDArray[np.uint32]


class Wave:
    """``vectors`` is ``[512, 64]`` uint32: vector registers 0-255, then the accumulator registers.

    ``u32``, ``i32`` and ``f32`` are its rows as views, so that an instruction costs no slicing.
    """

    __slots__ = (
        "_active",
        "counters",
        "defined",
        "done",
        "epoch",
        "exec_value",
        "f32",
        "full",
        "i32",
        "index",
        "lanes",
        "lds",
        "machine",
        "mask_cache",
        "pc",
        "scalar_states",
        "scalar_undefined",
        "scalars",
        "scc",
        "scc_defined",
        "scratch",
        "scratch_defined",
        "taint",
        "taint_source",
        "taint_written",
        "u32",
        "vector_states",
        "vectors",
    )

    def __init__(self, index: int, machine: Machine, lds: Lds, scratch_bytes: int) -> None:
        self.index = index
        self.machine = machine
        self.lds = lds
        self.vectors: UInt32Array = np.full((2 * ACCUMULATORS, LANES), POISON, np.uint32)
        self.u32: list[UInt32Array] = list(self.vectors)
        self.i32: list[npt.NDArray[np.int32]] = list(self.vectors.view(np.int32))
        self.f32: list[npt.NDArray[np.float32]] = list(self.vectors.view(np.float32))
        self.vector_states = [UNDEFINED] * (2 * ACCUMULATORS)
        self.defined: npt.NDArray[np.bool_] = np.zeros((2 * ACCUMULATORS, LANES), np.bool_)
        self.scalars = [POISON] * 128
        self.scalar_states = [UNDEFINED] * 128
        self.scalar_undefined = [0xFFFFFFFF] * 128
        """The undefined bits of each scalar register in the state UNDEFINED."""
        self.taint: LaneMask | None = None
        """Active lanes in which a source of the instruction now running is undefined."""
        self.taint_written = False
        self.taint_source = ""
        self.scc, self.scc_defined = 0, False
        self.mask_cache: dict[int, tuple[int, LaneMask]] = {}
        self.set_exec(ALL_LANES)
        self.scratch: UInt32Array = np.full((-(-scratch_bytes // 4), LANES), POISON, np.uint32)
        self.scratch_defined: npt.NDArray[np.bool_] = np.zeros(self.scratch.shape, np.bool_)
        self.counters = Counters(self._retire)
        self.pc = 0
        self.epoch = 0
        self.done = False

    # -- lane masks

    def set_exec(self, value: int) -> None:
        self.exec_value = value
        self.scalars[EXEC], self.scalars[EXEC + 1] = value & 0xFFFFFFFF, value >> 32
        self.scalar_states[EXEC] = self.scalar_states[EXEC + 1] = DEFINED
        self.full = value == ALL_LANES
        self.lanes = EVERY_LANE if self.full else mask_of(value)
        self._active = ALL_ACTIVE if self.full else None

    def active(self) -> npt.NDArray[np.intp]:
        """The numbers of the active lanes."""
        if self._active is None:
            self._active = np.flatnonzero(self.lanes)
        return self._active

    def mask(self, register: int) -> LaneMask:
        """The scalar pair at ``register`` as 64 bools, a vector source: undefined bits taint their lanes."""
        states = self.scalar_states
        if states[register] or states[register + 1]:
            undefined = self.undefined64(register)
            if undefined:
                self.add_taint(mask_of(undefined), scalar_name(register))
        value = self.scalars[register] | self.scalars[register + 1] << 32
        cached = self.mask_cache.get(register)
        if cached is not None and cached[0] == value:
            return cached[1]
        mask = mask_of(value)
        self.mask_cache[register] = (value, mask)
        return mask

    def set_mask(self, register: int, mask: LaneMask) -> None:
        """Writes a compare result: inactive lanes get 0, tainted ones are undefined."""
        if not self.full:
            mask = mask & self.lanes
        value = value_of(mask)
        if self.taint is not None:
            self.taint_written = True
            self.set_scalar64(register, value, value_of(self.taint))
        elif register != EXEC and not (self.scalar_states[register] or self.scalar_states[register + 1]):
            self.scalars[register], self.scalars[register + 1] = value & 0xFFFFFFFF, value >> 32
        else:
            self.set_scalar64(register, value)
        self.mask_cache[register] = (value, mask)

    # -- undefined sources of the instruction now running

    def add_taint(self, lanes: LaneMask, source: str) -> None:
        """The active ones of ``lanes`` are undefined in the register named ``source``."""
        lanes = lanes & self.lanes
        if lanes.any():
            self.taint_source = source
            self.taint = lanes if self.taint is None else self.taint | lanes

    def settle(self) -> None:
        """Ends an instruction with tainted sources: raises unless it carried the taint on to its result."""
        taint, written = self.taint, self.taint_written
        self.taint, self.taint_written = None, False
        if taint is not None and not written:
            raise UndefinedReadError(
                f"{self.taint_source}, which nothing wrote, has an effect here", lane=int(np.argmax(taint))
            )

    # -- scalar registers

    def scalar(self, register: int) -> int:
        """A scalar register that must be defined."""
        if self.scalar_states[register]:
            self._refuse_scalar(register)
        return self.scalars[register]

    def scalar64(self, register: int) -> int:
        if self.scalar_states[register] or self.scalar_states[register + 1]:
            self._refuse_scalar(register if self.scalar_states[register] else register + 1)
        return self.scalars[register] | self.scalars[register + 1] << 32

    def undefined32(self, register: int) -> int:
        """The undefined bits of a scalar register; raises if it is in flight."""
        state = self.scalar_states[register]
        if state == IN_FLIGHT:
            self._refuse_scalar(register)
        return self.scalar_undefined[register] if state else 0

    def undefined64(self, register: int) -> int:
        return self.undefined32(register) | self.undefined32(register + 1) << 32

    def set_scalar(self, register: int, value: int, undefined: int = 0) -> None:
        """``undefined`` are the bits of ``value`` that are not defined."""
        if register in (EXEC, EXEC + 1):
            raise UnsupportedInstructionError("a write of one half of exec")
        if self.scalar_states[register] == IN_FLIGHT:
            self._refuse_scalar(register)
        self.scalars[register] = value
        self.scalar_states[register] = UNDEFINED if undefined else DEFINED
        self.scalar_undefined[register] = undefined

    def set_scalar64(self, register: int, value: int, undefined: int = 0) -> None:
        if register == EXEC:
            if undefined:
                raise UndefinedReadError(
                    "exec would become undefined", lane=(undefined & -undefined).bit_length() - 1
                )
            self.set_exec(value)
            return
        self.set_scalar(register, value & 0xFFFFFFFF, undefined & 0xFFFFFFFF)
        self.set_scalar(register + 1, value >> 32, undefined >> 32)

    def read_scc(self) -> int:
        if not self.scc_defined:
            raise UndefinedReadError("scc is read, nothing wrote it")
        return self.scc

    def set_scc(self, value: int | None) -> None:
        """``None`` leaves scc undefined."""
        self.scc, self.scc_defined = value or 0, value is not None

    def _refuse_scalar(self, register: int) -> None:
        name = scalar_name(register)
        if self.scalar_states[register] == IN_FLIGHT:
            raise MissingWaitError(self._in_flight_message(name, register, False))
        raise UndefinedReadError(f"{name} is used, nothing wrote it")

    # -- vector registers

    def taint_from(self, register: int) -> None:
        """Slow half of a read: undefined active lanes taint the instruction; raises if in flight."""
        if self.vector_states[register] == IN_FLIGHT:
            self._refuse_vector(register)
        self.add_taint(~self.defined[register], vector_name(register))

    def require(self, register: int, lanes: LaneMask) -> None:
        """Raises unless the register is defined in all of ``lanes``."""
        if self.vector_states[register] == IN_FLIGHT:
            self._refuse_vector(register)
        if self.vector_states[register] == UNDEFINED:
            missing = ~self.defined[register] & lanes
            if missing.any():
                raise UndefinedReadError(
                    f"{vector_name(register)} is used, nothing wrote it in {int(missing.sum())} of the lanes",
                    lane=int(np.argmax(missing)),
                )

    def write_tainted(self, register: int, value: npt.NDArray[Any], taint: LaneMask) -> None:
        """Slow half of a write under exec whose value is undefined in the tainted lanes."""
        self.taint_written = True
        row = np.empty(LANES, np.uint32)
        row[:] = value.view(np.uint32)
        self.move(register, row, ~taint, self.lanes)

    def before_write(self, register: int) -> None:
        """Slow half of a write under exec: raises if in flight, else marks the active lanes defined."""
        if self.vector_states[register] == IN_FLIGHT:
            self._refuse_vector(register)
        self.mark(register, self.lanes)

    def mark(self, register: int, lanes: LaneMask) -> None:
        """Lanes of an undefined register became defined."""
        if self.vector_states[register] == UNDEFINED:
            row = self.defined[register]
            row |= lanes
            if row.all():
                self.vector_states[register] = DEFINED

    def definedness(self, register: int) -> LaneMask | None:
        """Which lanes of a register hold a value, None for all of them; for moves. Raises if it is in
        flight."""
        state = self.vector_states[register]
        if state == DEFINED:
            return None
        if state == IN_FLIGHT:
            self._refuse_vector(register)
        defined: LaneMask = self.defined[register]
        return defined

    def move(self, register: int, values: UInt32Array, defined: LaneMask | None, lanes: LaneMask) -> None:
        """Writes ``lanes`` of a register with values of which only some are ``defined`` (None: all)."""
        if self.vector_states[register] == IN_FLIGHT:
            self._refuse_vector(register)
        np.copyto(self.u32[register], values, where=lanes)
        if defined is None:
            self.mark(register, lanes)
            return
        row = self.defined[register]
        if self.vector_states[register] == DEFINED:
            row[:] = True
        np.copyto(row, defined, where=lanes)
        self.vector_states[register] = DEFINED if row.all() else UNDEFINED

    # -- memory operations

    def load_states(self, first: int, count: int, defined: npt.NDArray[np.bool_] | None) -> tuple[int, ...]:
        """Marks registers as loaded under exec and returns the states they get when the load is over.

        ``defined`` is ``[count, 64]`` (inactive lanes ignored) or None where every loaded lane is defined.
        """
        states = self.vector_states
        if self.full and defined is None:
            return (DEFINED,) * count
        result = []
        for at in range(count):
            row = self.defined[first + at]
            if states[first + at] == DEFINED:
                row[:] = True
            np.copyto(row, True if defined is None else defined[at], where=self.lanes)
            result.append(DEFINED if row.all() else UNDEFINED)
        return tuple(result)

    def refuse_in_flight(self, first: int, count: int) -> None:
        for register in range(first, first + count):
            if self.vector_states[register] == IN_FLIGHT:
                self._refuse_vector(register)

    def supersede_loads(self, first: int, count: int) -> None:
        """Before a vector memory load: it may load registers again that an earlier one is still to write.

        These loads write their registers in the order of issue (LLVM's feature ``vmem-write-vgpr-in-order``),
        so the later one's data stay. Raises for registers that anything else will write.
        """
        for register in range(first, first + count):
            if self.vector_states[register] == IN_FLIGHT:
                state = self.counters.supersede(register)
                if state is None:
                    self.refuse_in_flight(register, 1)
                else:
                    self.vector_states[register] = state

    def depart(self, flight: Flight) -> None:
        """Puts the registers of an operation just issued in flight."""
        for register in flight.vectors:
            self.vector_states[register] = IN_FLIGHT
        for register in flight.scalars:
            self.scalar_states[register] = IN_FLIGHT

    def _retire(self, flight: Flight) -> None:
        states = self.vector_states
        for register, state in zip(flight.vectors, flight.vector_states):
            states[register] = state
        for register, state in zip(flight.scalars, flight.scalar_states):
            self.scalar_states[register] = state
        for access in flight.accesses:
            access.last_epoch = self.epoch
        if flight.finish is not None:
            flight.finish()

    def _refuse_vector(self, register: int) -> NoReturn:
        raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))

    def _in_flight_message(self, name: str, register: int, vector: bool) -> str:
        for flight in self.counters.in_flight():
            if register in (flight.vectors if vector else flight.scalars):
                return f"{name} is touched before an s_waitcnt covers the load of line {flight.line}"
        return f"{name} is touched while a load of it is in flight"
