"""Executes gfx950 assembly on a CPU, so that a compiled kernel can be proven without the device.

    program = parse_program(assembly_text)  # FlyDSL's dumped .s text, or llvm-objdump -d text
    memory = Memory()                       # device address == host address
    out = memory.register_array(scores, "scores", initialised=False)
    kernargs = struct.pack("<qi", out.address, 4)
    report = run(
        program, "score_prefill_h4", grid=(items, 1, 1), block=(256, 1, 1), kernargs=kernargs, memory=memory
    )

``parse_program(text, metadata=None) -> Program``: ``program.kernels[name]`` is a ``Kernel`` with its
``KernelMetadata``, ``instructions`` (mnemonic, operands, line, text, address) and ``labels``. Disassembly
of a code object carries no metadata: pass ``{name: from_descriptor(name, descriptor_bytes, arguments)}``.

``Memory``: ``register(address, size, name, writable=, initialised=)`` and ``register_array(array, name,
...)`` return a ``Region``; ``Region.unwritten()`` lists the bytes nobody wrote. ``Memory(resolve=...)``
lets a runtime answer for allocations it owns.

``run(program, kernel_name, *, grid, block, kernargs, memory, schedule=Schedule(), options=RunOptions()) ->
RunReport``: ``grid`` counts workgroups, ``block`` threads; ``kernargs`` are the bytes of the kernarg
segment, hidden arguments included. ``SCHEDULES`` holds the orders a test should sweep.

``hazard_distances(kernel)`` gives the fewest wait states between dependent instructions and what gfx950
needs; ``check_hazards`` raises where there are too few. ``RunReport`` counts instructions by class, mnemonic
and label; with ``RunOptions(bank_conflicts=True, trace=True)`` also LDS bank conflicts and each wave's path.

Nothing is guessed: an unknown mnemonic, operand, modifier or mode raises, and so does what no assembler has
an encoding for. All that is known of a mnemonic is its row in the table of instructions (``isa``). Text
means what LLVM's assembler makes of it. Memory is deferred: what is loaded may be touched only behind the
``s_waitcnt`` that covers it. Registers, LDS and scratch start undefined. Every fault is an
``InterpreterError`` with the assembly line, workgroup, wave and lane. Timing is not modelled.
"""

from __future__ import annotations

from kernel.gfx950.errors import (
    AssemblySyntaxError,
    BarrierError,
    HazardError,
    InstructionLimitError,
    InterpreterError,
    MissingWaitError,
    OutOfBoundsError,
    RaceError,
    UndefinedReadError,
    UnencodableError,
    UnsupportedInstructionError,
)
from kernel.gfx950.hazards import HazardDistance, check_hazards, hazard_distances
from kernel.gfx950.launch import RunOptions, RunReport, run
from kernel.gfx950.memory import SCHEDULES, Memory, Region, Schedule
from kernel.gfx950.parse import from_descriptor, parse_program
from kernel.gfx950.program import Instruction, Kernel, KernelArgument, KernelMetadata, Program

__all__ = [
    "SCHEDULES",
    "AssemblySyntaxError",
    "BarrierError",
    "HazardDistance",
    "HazardError",
    "Instruction",
    "InstructionLimitError",
    "InterpreterError",
    "Kernel",
    "KernelArgument",
    "KernelMetadata",
    "Memory",
    "MissingWaitError",
    "OutOfBoundsError",
    "Program",
    "RaceError",
    "Region",
    "RunOptions",
    "RunReport",
    "Schedule",
    "UndefinedReadError",
    "UnencodableError",
    "UnsupportedInstructionError",
    "check_hazards",
    "from_descriptor",
    "hazard_distances",
    "parse_program",
    "run",
]
