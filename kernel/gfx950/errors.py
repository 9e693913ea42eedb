"""Faults of an interpreted gfx950 kernel: one class per kind, each with the place where it happened."""

from __future__ import annotations

from kernel.errors import IndexerError


class InterpreterError(IndexerError):
    """Base of every fault found while parsing or running gfx950 assembly.

    ``line`` is the 1-based line of the assembly text and ``text`` that line; ``kernel``, ``workgroup``,
    ``wave`` and ``lane`` say who ran it. Each is None where it does not apply (parsing has no wave).
    """

    def __init__(self, problem: str, *, lane: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.lane = lane
        self.line: int | None = None
        self.text: str | None = None
        self.kernel: str | None = None
        self.workgroup: tuple[int, int, int] | None = None
        self.wave: int | None = None

    def locate(
        self,
        *,
        line: int | None = None,
        text: str | None = None,
        kernel: str | None = None,
        workgroup: tuple[int, int, int] | None = None,
        wave: int | None = None,
    ) -> InterpreterError:
        """Fills in what is not known yet and returns the error itself, ready to raise."""
        self.line = line if self.line is None else self.line
        self.text = text if self.text is None else self.text
        self.kernel = kernel if self.kernel is None else self.kernel
        self.workgroup = workgroup if self.workgroup is None else self.workgroup
        self.wave = wave if self.wave is None else self.wave
        return self

    def __str__(self) -> str:
        who = [
            f"{name} {value}"
            for name, value in (
                ("kernel", self.kernel),
                ("workgroup", self.workgroup),
                ("wave", self.wave),
                ("lane", self.lane),
            )
            if value is not None
        ]
        where = f"line {self.line}: `{self.text}`: " if self.line is not None else ""
        return f"{where}{self.problem}" + (f" ({', '.join(who)})" if who else "")


class AssemblySyntaxError(InterpreterError):
    """The text is not gfx950 assembly this parser reads."""


class UnsupportedInstructionError(InterpreterError):
    """A mnemonic, operand, modifier or mode whose meaning is not implemented. It is never guessed."""


class UnencodableError(InterpreterError):
    """gfx950 has no encoding for this instruction with these operands: no assembler takes it."""


class UndefinedReadError(InterpreterError):
    """A value that nothing ever wrote is used by more than a move."""


class MissingWaitError(InterpreterError):
    """A register or LDS byte is touched before the ``s_waitcnt`` that covers the access in flight."""


class OutOfBoundsError(InterpreterError):
    """An access outside its allocation, misaligned, or a write to read-only memory."""


class RaceError(InterpreterError):
    """Two waves (or two lanes of one store) touch the same byte without order, one of them writing."""


class BarrierError(InterpreterError):
    """Waves of a workgroup disagree about a barrier: some ended while others wait at it."""


class HazardError(InterpreterError):
    """Too few wait states between two instructions; the hardware would read or write a stale register."""


class InstructionLimitError(InterpreterError):
    """A wave ran more instructions than the launch allows: most likely an endless loop."""
