"""Whose sequences are whose. Ids are random, so none is guessed, and none outlives a restart as another's."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

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
        max_owner_sequences: live sequences of one owner; None: no bound but the other one.
        max_owner_keys: keys of one owner's sequences together, a fork's counted again; None: no bound.
    """

    def __init__(
        self, max_sequences: int, max_owner_sequences: int | None = None, max_owner_keys: int | None = None
    ) -> None:
        self._max_sequences = max_sequences
        self._max_owner_sequences = max_owner_sequences
        self._max_owner_keys = max_owner_keys
        self._by_owner: dict[str, dict[str, LiveSequence]] = {}
        self._keys: dict[str, int] = {}
        self._used: dict[str, float] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Live sequences of all owners."""
        return self._count

    def check_room(self, owner: str, *, sequences: int = 0, keys: int = 0) -> None:
        """Refuse what an owner, or the server, would have too much of.

        Args:
            owner: who is to have them.
            sequences: sequences to be made.
            keys: keys to be appended.

        Raises:
            ProblemError: 409.
        """
        own = len(self._by_owner.get(owner, {}))
        held = self._keys.get(owner, 0)
        for kind, argument, value, limit, asked in (
            ("too-many-sequences", "max_sequences", self._count, self._max_sequences, sequences),
            ("too-many-sequences", "max_sequences_per_token", own, self._max_owner_sequences, sequences),
            ("too-many-keys", "max_keys_per_token", held, self._max_owner_keys, keys),
        ):
            if limit is not None and asked and value + asked > limit:
                raise ProblemError(
                    409,
                    kind,
                    f"{argument} = {limit}: {value} are live and {asked} would be added; delete some "
                    "sequences, or raise the limit",
                    argument=argument,
                    value=value + asked,
                    limit=limit,
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

    def use(self, owner: str, sequence: str) -> LiveSequence:
        """A sequence of this owner for a call that keeps it from expiring.

        Raises:
            UnknownSequenceError: it has none of that id, whatever others have.
        """
        found = self.get(owner, sequence)
        self._used[sequence] = time.monotonic()
        return found

    def idle(self, seconds: float) -> list[tuple[str, LiveSequence]]:
        """Sequences that no call used for so long, each with its owner."""
        before = time.monotonic() - seconds
        return [
            (owner, sequence)
            for owner, sequences in self._by_owner.items()
            for sequence in sequences.values()
            if self._used[sequence.id] <= before
        ]

    def of_owner(self, owner: str) -> list[LiveSequence]:
        """All of an owner's sequences, oldest first."""
        return list(self._by_owner.get(owner, {}).values())

    def add(self, owner: str, scorer_id: int, length: int) -> LiveSequence:
        """Give a new sequence of the scorer to an owner."""
        sequence = LiveSequence(secrets.token_hex(ID_BYTES), scorer_id, length)
        self._used[sequence.id] = time.monotonic()
        self._by_owner.setdefault(owner, {})[sequence.id] = sequence
        self._keys[owner] = self._keys.get(owner, 0) + length
        self._count += 1
        return sequence

    def grow(self, owner: str, sequence: LiveSequence, length: int) -> LiveSequence:
        """Note a sequence's new length."""
        grown = replace(sequence, length=length)
        self._by_owner[owner][sequence.id] = grown
        self._keys[owner] += length - sequence.length
        return grown

    def remove(self, owner: str, sequence: LiveSequence) -> None:
        """Forget a sequence."""
        del self._by_owner[owner][sequence.id]
        del self._used[sequence.id]
        self._keys[owner] -= sequence.length
        self._count -= 1
