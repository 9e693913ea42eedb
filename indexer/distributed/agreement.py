"""How ranks make sure that they make the same call in the same state, and how it went on each of them.

Before a call changes anything that cannot be undone, or returns, every rank sends a header of a fixed size to
all others:

    8 little-endian 64-bit integers   the fields of :class:`Header`, in their order
    192 bytes                         its text, in UTF-8
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Real

import torch

from indexer.distributed.ranks import RankGroup
from indexer.distributed.traffic import HEADER_BYTES
from kernel.errors import IndexerError, OutOfPagesError, RankDisagreementError
from kernel.scalars import as_int

_FORMAT = struct.Struct("<8q192s")
_TEXT_BYTES = 192
_DONE, _REFUSED, _OUT_OF_PAGES = 0, 1, 2
_SAME_REMEDY = "make the same calls in the same order on every rank"
_CONFIGURED = " with "
"""Between the first call and what the rank was configured with, in the text of its header."""


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
        config: what all ranks must have been configured with, by argument. Looked at when the first call
            is settled, so its body may still write to it.
        free_pages: pages that this rank's cache has free now.
    """

    def __init__(self, ranks: RankGroup, config: Mapping[str, object], free_pages: Callable[[], int]) -> None:
        self._ranks = ranks
        self._config = config
        self._config_print = 0
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
            _check_same(headers, tuple(self._config))
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
        if not self._calls:
            configured = json.dumps([_plain(value) for value in self._config.values()], separators=(",", ":"))
            self._config_print = _fingerprint(configured)
            if outcome == _DONE:
                text += f"{_CONFIGURED}{configured}"
        return Header(
            config=self._config_print,
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


def _check_same(headers: list[Header], arguments: tuple[str, ...]) -> None:
    others, first = _others([header.config for header in headers])
    if others:
        differing, remedy = _differing(headers, others, first, arguments)
        raise RankDisagreementError(others, f"was configured differently{differing}", remedy)
    reasons: tuple[tuple[str, Callable[[Header], object]], ...] = (
        ("made other calls before", lambda header: (header.state, header.calls)),
        ("makes another call", lambda header: header.call),
    )
    for reason, view in reasons:
        others, first = _others([view(header) for header in headers])
        if others:
            texts = f"{headers[others[0]].text!r}, and rank {first} {headers[first].text!r}"
            raise RankDisagreementError(others, f"{reason} ({texts})", _SAME_REMEDY)


def _others(views: list[object]) -> tuple[tuple[int, ...], int]:
    """The ranks whose view is not the commonest, and the first whose is."""
    # Of equally many the first: Counter keeps the order of ranks.
    common = Counter(views).most_common(1)[0][0]
    return tuple(rank for rank, found in enumerate(views) if found != common), views.index(common)


def _differing(
    headers: list[Header], others: tuple[int, ...], first: int, arguments: tuple[str, ...]
) -> tuple[str, str]:
    """Each argument that differs, with both values and a rank that has each; and the remedy."""
    values = {rank: _configured(headers[rank].text) for rank in (first, *others)}
    if any(len(found) != len(arguments) for found in values.values()):  # a text too long for a header
        return "", "pass the same arguments on every rank"
    shown: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        common = values[first][place]
        rank = next((rank for rank in others if values[rank][place] != common), None)
        if rank is not None:
            shown[argument] = f"{argument} = {values[rank][place]!r}, and {common!r} on rank {first}"
            if len(others) > 1:
                shown[argument] = f"rank {rank}: {shown[argument]}"
    return f" ({'; '.join(shown.values())})", f"pass the same {' and '.join(shown)} on every rank"


def _configured(text: str) -> list[object]:
    try:
        values: list[object] = json.loads(text.partition(_CONFIGURED)[2])
    except ValueError:
        return []
    return values


def _plain(value: object) -> object:
    """A value as JSON has it: numbers of any type that are equal are the same."""
    if value is None or isinstance(value, bool):
        return value
    number = as_int(value)
    if number is not None:
        return number
    if isinstance(value, Real):
        real = float(value)
        return int(real) if real.is_integer() else real
    return str(value)


def _fingerprint(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
