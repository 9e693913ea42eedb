"""Whose sequences are whose. Ids are random, so none is guessed, and none outlives a restart as another's."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kernel.errors import UnknownSequenceError
from server.problems import ProblemError

ID_BYTES = 8
"""Random bytes of a sequence's id, written in hexadecimal."""


@dataclass(frozen=True)
class LiveSequence:
    """A sequence as of the last call that finished."""

    id: str
    scorer_id: int
    length: int
    """Tokens."""


class SequenceTable:
    """Live sequences by owner. Changed on the device's thread only; entries are replaced, never altered, so
    the event loop may read at any time.

    Args:
        max_sequences: live sequences of all owners together.
    """

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._by_owner: dict[str, dict[str, LiveSequence]] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Live sequences of all owners."""
        return self._count

    def check_room(self) -> None:
        """Refuse to make one sequence too many.

        Raises:
            ProblemError: 409.
        """
        if self._count >= self._max_sequences:
            raise ProblemError(
                409,
                "too-many-sequences",
                f"{self._count} sequences are live, the most of this server; delete some",
                argument="max_sequences",
                value=self._max_sequences,
            )

    def get(self, owner: str, sequence: str) -> LiveSequence:
        """A sequence of this owner.

        Raises:
            UnknownSequenceError: it has none of that id, whatever others have.
        """
        found = self._by_owner.get(owner, {}).get(sequence)
        if found is None:
            raise UnknownSequenceError(sequence)
        return found

    def of_owner(self, owner: str) -> list[LiveSequence]:
        """All of an owner's sequences, oldest first."""
        return list(self._by_owner.get(owner, {}).values())

    def add(self, owner: str, scorer_id: int, length: int) -> LiveSequence:
        """Give a new sequence of the scorer to an owner."""
        sequence = LiveSequence(secrets.token_hex(ID_BYTES), scorer_id, length)
        self._by_owner.setdefault(owner, {})[sequence.id] = sequence
        self._count += 1
        return sequence

    def grow(self, owner: str, sequence: LiveSequence, length: int) -> LiveSequence:
        """Note a sequence's new length."""
        grown = LiveSequence(sequence.id, sequence.scorer_id, length)
        self._by_owner[owner][sequence.id] = grown
        return grown

    def remove(self, owner: str, sequence: LiveSequence) -> None:
        """Forget a sequence."""
        del self._by_owner[owner][sequence.id]
        self._count -= 1
