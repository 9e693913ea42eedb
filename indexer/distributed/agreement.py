"""How ranks make sure that they make the same call in the same state, and how it went on each of them.

Before a call changes anything that cannot be undone, or returns, every rank sends a header of a fixed size to
all others:

    8 little-endian 64-bit integers   the fields of :class:`Header`, in their order
    192 bytes                         its text, in UTF-8
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch

from indexer.distributed.ranks import RankGroup
from indexer.distributed.traffic import HEADER_BYTES
from kernel.errors import IndexerError, OutOfPagesError, RankDisagreementError

_FORMAT = struct.Struct("<8q192s")
_TEXT_BYTES = 192
_DONE, _REFUSED, _OUT_OF_PAGES = 0, 1, 2
_SAME_REMEDY = "make the same calls in the same order on every rank"


@dataclass(frozen=True)
class Header:
    """A rank's statement about a call.

    Attributes:
        config: fingerprint of what the rank was configured with.
        state: of the calls that changed it before this one.
        call: of this one.
        outcome: done, refused, or out of pages.
        needed_pages: pages that the call needs, if there are too few.
        short_pages: pages that are free then.
        free_pages: pages that are free once the call is done.
        calls: calls before this one.
        text: the call or the refusal, for people.
    """

    config: int
    state: int
    call: int
    outcome: int
    needed_pages: int
    short_pages: int
    free_pages: int
    calls: int
    text: str

    def packed(self) -> torch.Tensor:
        """``[HEADER_BYTES]`` uint8."""
        text = self.text.encode()[:_TEXT_BYTES]
        numbers = (
            self.config,
            self.state,
            self.call,
            self.outcome,
            self.needed_pages,
            self.short_pages,
            self.free_pages,
            self.calls,
        )
        return torch.frombuffer(bytearray(_FORMAT.pack(*numbers, text)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> Header:
        """The header in ``[HEADER_BYTES]`` uint8."""
        numbers_and_text = list(_FORMAT.unpack(packed.numpy().tobytes()))
        numbers_and_text[-1] = numbers_and_text[-1].rstrip(b"\0").decode(errors="ignore")
        return cls(*numbers_and_text)


class Statement:
    """What this rank has to say about a call that is being made."""

    def __init__(self, operation: str) -> None:
        self.call = operation
        self.freed_pages = 0
        """Pages that the call will free once all agree."""

    def says(self, *facts: object) -> None:
        """Note what all ranks must agree about."""
        self.call += f" {facts!r}"


class Agreement:
    """Settles calls over the ranks of a group.

    Args:
        ranks: the group.
        config: what all ranks must have been configured with.
        free_pages: pages that this rank's cache has free now.
    """

    def __init__(self, ranks: RankGroup, config: object, free_pages: Callable[[], int]) -> None:
        self._ranks = ranks
        self._config = _fingerprint(repr(config))
        self._free_pages_now = free_pages
        self._state = 0
        self._calls = 0
        self.free_pages: tuple[int, ...] = (0,) * ranks.size
        """Free pages of every rank after the last call that all agreed about."""

    @contextmanager
    def settled(self, operation: str, *, changes: bool) -> Iterator[Statement]:
        """Settle the call that the body prepares: past this, all ranks have prepared the same one.

        Args:
            operation: its name.
            changes: whether it changes the state.

        Raises:
            RankDisagreementError: ranks made other calls, or are in other states, or one refused this one.
            RankLostError: a rank ended or did not answer.
            OutOfPagesError: a rank has too few free pages.
        """
        statement = Statement(operation)
        try:
            yield statement
        except BaseException as error:
            self._settle(statement, error)
            raise
        self._settle(statement, None)
        if changes:
            self._state = _fingerprint(f"{self._state} {statement.call}")

    def _settle(self, statement: Statement, error: BaseException | None) -> None:
        headers = self._exchanged(self._header(statement, error))
        self._calls += 1
        outcomes = [header.outcome for header in headers]
        if not any(outcomes):
            _check_same(headers)
            self.free_pages = tuple(header.free_pages for header in headers)
            return
        shortages = [header for header in headers if header.outcome == _OUT_OF_PAGES]
        if error is not None and not isinstance(error, OutOfPagesError):
            return
        if shortages:
            worst = max(shortages, key=lambda header: header.needed_pages - header.short_pages)
            num_pages = int(worst.text)
            raise OutOfPagesError(worst.needed_pages, worst.short_pages, num_pages) from error
        refused = tuple(rank for rank, outcome in enumerate(outcomes) if outcome == _REFUSED)
        text = headers[refused[0]].text
        raise RankDisagreementError(refused, f"refused the call ({text})", _SAME_REMEDY)

    def _header(self, statement: Statement, error: BaseException | None) -> Header:
        shortage = error if isinstance(error, OutOfPagesError) else None
        if shortage is not None:
            outcome, text = _OUT_OF_PAGES, str(shortage.num_pages)
        elif error is not None:
            own = isinstance(error, IndexerError)
            outcome, text = _REFUSED, str(error) if own else f"{type(error).__name__}: {error}"
        else:
            outcome, text = _DONE, statement.call
        return Header(
            config=self._config,
            state=self._state,
            call=_fingerprint(statement.call),
            outcome=outcome,
            needed_pages=shortage.needed if shortage else 0,
            short_pages=shortage.free if shortage else 0,
            free_pages=self._free_pages_now() + statement.freed_pages if error is None else 0,
            calls=self._calls,
            text=text,
        )

    def _exchanged(self, header: Header) -> list[Header]:
        packed = header.packed()
        if packed.nbytes != HEADER_BYTES:
            raise AssertionError("a header has one size")
        gathered = torch.empty((self._ranks.size, HEADER_BYTES), dtype=torch.uint8, device="cpu")
        self._ranks.gather(packed, gathered)
        return [Header.unpacked(row) for row in gathered]


def _check_same(headers: list[Header]) -> None:
    reasons: tuple[tuple[str, Callable[[Header], object]], ...] = (
        ("was configured differently", lambda header: header.config),
        ("made other calls before", lambda header: (header.state, header.calls)),
        ("makes another call", lambda header: header.call),
    )
    for reason, view in reasons:
        views = [view(header) for header in headers]
        # Of equally many the first: Counter keeps the order of ranks.
        common = Counter(views).most_common(1)[0][0]
        others = tuple(rank for rank, found in enumerate(views) if found != common)
        if others:
            first = views.index(common)
            texts = f"{headers[others[0]].text!r}, and rank {first} {headers[first].text!r}"
            raise RankDisagreementError(others, f"{reason} ({texts})", _SAME_REMEDY)


def _fingerprint(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
