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

from typing import Any

import numpy as np
import numpy.typing as npt

from kernel.gfx950.counters import Counters, Flight
from kernel.gfx950.errors import MissingWaitError, UndefinedReadError, UnsupportedInstructionError
from kernel.gfx950.lds import Lds
from kernel.gfx950.machine import Machine
from kernel.gfx950.operands import ACCUMULATORS, EXEC
from kernel.gfx950.registers import LaneMask, mask_of, scalar_name, value_of, vector_name

LANES = 64
DEFINED, UNDEFINED, IN_FLIGHT = 0, 1, 2
ALL_LANES = (1 << LANES) - 1
POISON = 0x7FC0DEAD
"""A quiet NaN that is easy to recognise, in every register nothing wrote."""

UInt32Array = npt.NDArray[np.uint32]


class Wave:
    """``vectors`` is ``[512, 64]`` uint32: vector registers 0-255, then the accumulator registers.

    ``u32``, ``i32`` and ``f32`` are its rows as views, so that an instruction costs no slicing.
    """

    __slots__ = (
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
        self.lanes = mask_of(value)

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
        if self.taint is None:
            self.set_scalar64(register, value)
        else:
            self.taint_written = True
            self.set_scalar64(register, value, value_of(self.taint))
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
            raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))
        self.add_taint(~self.defined[register], vector_name(register))

    def require(self, register: int, lanes: LaneMask) -> None:
        """Raises unless the register is defined in all of ``lanes``."""
        if self.vector_states[register] == IN_FLIGHT:
            raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))
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
            raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))
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
            raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))
        defined: LaneMask = self.defined[register]
        return defined

    def move(self, register: int, values: UInt32Array, defined: LaneMask | None, lanes: LaneMask) -> None:
        """Writes ``lanes`` of a register with values of which only some are ``defined`` (None: all)."""
        if self.vector_states[register] == IN_FLIGHT:
            raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))
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
                raise MissingWaitError(self._in_flight_message(vector_name(register), register, True))

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
        for register, state in zip(flight.vectors, flight.vector_states, strict=True):
            self.vector_states[register] = state
        for register, state in zip(flight.scalars, flight.scalar_states, strict=True):
            self.scalar_states[register] = state
        for access in flight.accesses:
            access.last_epoch = self.epoch
        if flight.finish is not None:
            flight.finish()

    def _in_flight_message(self, name: str, register: int, vector: bool) -> str:
        for flight in self.counters.in_flight():
            if register in (flight.vectors if vector else flight.scalars):
                return f"{name} is touched before an s_waitcnt covers the load of line {flight.line}"
        return f"{name} is touched while a load of it is in flight"
