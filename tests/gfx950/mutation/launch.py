"""What a campaign runs mutants under, and what says that one went wrong."""

from __future__ import annotations

from typing import Protocol

from kernel.gfx950 import Kernel, RunReport, Schedule


class WrongScoresError(Exception):
    """The kernel ended, and its outputs are not what the oracle says."""


class WrongWorkError(Exception):
    """Outputs are right, and the way to them is not the one that is due."""


class Launch(Protocol):
    """Inputs of a kernel whose outputs are known; see ``PrefillLaunch``, ``DecodeLaunch``, ``TopkLaunch`` and
    ``InsertLaunch``."""

    @property
    def name(self) -> str: ...

    def run(self, kernel: Kernel) -> RunReport:
        """Raises what the kernel does wrong."""
        ...

    def under(self, schedule: Schedule) -> Launch:
        """The same launch in another order of waves."""
        ...
