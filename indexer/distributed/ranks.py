"""The ranks of a process group: all-to-all messages with a deadline, and agreement about every call.

Messages on the host are sent from each rank to each, not through a collective: a collective passes them along
a ring, so that a rank that ends looks to most others like a neighbour that is late. This way each rank waits
for every other one itself and can name the one that fails. The bytes are those of an all-gather.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from numbers import Real
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from kernel.arguments import as_int
from kernel.errors import (
    IndexerError,
    InvalidArgumentError,
    OutOfPagesError,
    RankDisagreementError,
    RankLostError,
)

_FIRST_TAG = 0x4E56_0000
"""Of messages on the host: far from those that a program counts up from 0."""
_MAX_SECONDS = 86400
_POLL_SECONDS = 2e-5
_LOST_REMEDY = "start the ranks again and make the scorer anew"
_NCCL_REMEDY = (
    "give each rank a GPU of its own, read what NCCL logs with NCCL_DEBUG=INFO, and start the ranks again"
)

_num_made: Counter[str] = Counter()
"""Rank groups of this process by the name of their process group: ranks make them in one order."""


class RankGroup:
    """The ranks of a process group. Every rank makes it, and sends the same messages.

    Args:
        group: the default group when None. It needs Gloo for tensors on the host; tensors on a GPU go over
            NCCL (RCCL on AMD) if it has that for them, else through the host. A loss there aborts NCCL's part
            of it.
        deadline_seconds: time that ranks get to answer, from when this one asks.

    Attributes:
        rank: this one, in the group.
        size: ranks of the group.
        bytes_sent: payload given to the transport so far, to all other ranks together.
        bytes_received: payload asked of them.
        lost: the error that every later message raises; None as long as all ranks answer.

    Raises:
        InvalidArgumentError: there is no such process group, or the deadline is no time.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline_seconds: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgumentError(
                "group",
                group,
                "torch.distributed is not initialised",
                "start the program with torchrun and call torch.distributed.init_process_group() first",
            )
        if not isinstance(deadline_seconds, (int, float)) or not 0 < deadline_seconds < _MAX_SECONDS:
            raise InvalidArgumentError(
                "deadline_seconds",
                repr(deadline_seconds),
                f"must be a number above 0 and below {_MAX_SECONDS}",
                "pass seconds, 30.0 say",
            )
        found = dist.group.WORLD if group is None else group
        if found is None:
            raise AssertionError("torch.distributed is initialised")
        self._group: dist.ProcessGroup = found
        backends = dist.get_backend_config(self._group)
        if "cpu:gloo" not in backends:
            raise InvalidArgumentError(
                "group",
                backends,
                "must have Gloo for tensors on the host",
                "call init_process_group('cpu:gloo,cuda:nccl')",
            )
        self._over_nccl = "cuda:nccl" in backends
        self.bytes_sent = 0
        self.bytes_received = 0
        self._deadline = timedelta(seconds=deadline_seconds)
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self.rank = self._global_ranks.index(dist.get_rank())
        self.size = len(self._global_ranks)
        self.lost: RankLostError | None = None
        self._tag = _FIRST_TAG + _num_made[self._group.group_name]
        _num_made[self._group.group_name] += 1

    def connect(self, device: torch.device) -> None:
        """Connect the ranks' GPUs, which NCCL does at the first message between them, and with no deadline.

        Args:
            device: where this rank's later messages lie; those on the host need no more than the group.

        Raises:
            RankLostError: NCCL cannot connect them, or a rank ended.
        """
        if device.type == "cuda" and self._over_nccl and self.size > 1:
            own = torch.zeros(1, dtype=torch.uint8, device=device)
            self._gather_on_device(own, own.repeat(self.size))

    def gather(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        """Send a payload to every other rank, and write what every rank sends.

        Args:
            payload: contiguous, of one shape and dtype on all ranks.
            gathered: ``[size, *payload.shape]``, contiguous, written.

        Raises:
            RankLostError: a rank ended, or did not send its own by the deadline.
        """
        if self.lost is not None:
            raise copy(self.lost)
        gathered[self.rank] = payload
        if not payload.numel() or self.size == 1:
            return
        self.bytes_sent += (self.size - 1) * payload.nbytes
        self.bytes_received += (self.size - 1) * payload.nbytes
        if payload.device.type == "cpu":
            self._gather_on_host(payload, gathered)
        elif self._over_nccl:
            self._gather_on_device(payload, gathered)
        else:
            on_host = torch.empty_like(gathered, device="cpu")
            self._gather_on_host(payload.cpu(), on_host)
            gathered.copy_(on_host)

    def _gather_on_host(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        end = time.monotonic() + self._deadline.total_seconds()
        failures: dict[int, str] = {}
        waiting: list[tuple[int, dist.Work]] = []
        for rank, peer in enumerate(self._global_ranks):
            if rank == self.rank:
                continue
            try:
                received = dist.irecv(gathered[rank], src=peer, group=self._group, tag=self._tag)
                sent = dist.isend(payload, dst=peer, group=self._group, tag=self._tag)
            except RuntimeError as error:
                failures[rank] = str(error)
                continue
            waiting += [(rank, work) for work in (received, sent) if work is not None]
        for rank, work in waiting:
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError as error:
                failures.setdefault(rank, str(error))
        if failures:
            self.lost = _lost(failures, self._deadline)
            raise copy(self.lost)

    def _gather_on_device(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(payload.device)
        own: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        own.record(stream)
        try:
            dist.all_gather_into_tensor(gathered, payload, group=self._group)
        except RuntimeError as error:
            self._give_up_on_device(f"NCCL failed ({error})", _NCCL_REMEDY)
        done.record(stream)
        own.synchronize()  # the payload is computed by now: only then does the deadline begin
        end = time.monotonic() + self._deadline.total_seconds()
        while not done.query():
            if time.monotonic() > end:
                self._give_up_on_device(_late(self._deadline), _LOST_REMEDY)
            time.sleep(_POLL_SECONDS)

    def _give_up_on_device(self, reason: str, remedy: str) -> NoReturn:
        # A collective that waits for a rank that ended would keep the stream, and what is queued, for ever.
        with suppress(RuntimeError):
            self._group._get_backend(torch.device("cuda")).abort()
        # Names those that ended.
        probe = torch.zeros((self.size, 1), dtype=torch.uint8, device="cpu")
        self._gather_on_host(probe[self.rank].clone(), probe)
        self.lost = RankLostError((), reason, remedy)
        raise copy(self.lost)


def _lost(failures: dict[int, str], deadline: timedelta) -> RankLostError:
    ranks = tuple(sorted(failures))
    late = [rank for rank in ranks if re.search("(?i)timed ?out|timeout", failures[rank])]
    ended = [rank for rank in ranks if rank not in late]
    if late and ended:
        # Perhaps the one gave up on the other: only its owner knows.
        reason = f"the connection to {', '.join(map(str, ended))} ended, {_late(deadline)} from the rest"
    else:
        reason = _late(deadline) if late else "its connection ended"
    return RankLostError(ranks, reason, _LOST_REMEDY)


def _late(deadline: timedelta) -> str:
    return f"no answer within {deadline.total_seconds():g} s"


# ---- What a call sends to each of the other ranks, in bytes ----
#
#     append, add, fork, free     HEADER_BYTES
#     score                       HEADER_BYTES + rows * candidate_bytes(k)
#     score with return_scores    HEADER_BYTES + rows * share_bytes(S, context ranks)
#
# ``rows`` are query tokens times the index heads of the rank. A rank receives as much from each other rank.

HEADER_BYTES = 256
"""A rank's statement about a call: fingerprints, outcome, free pages, and a human-readable text."""


def candidate_bytes(topk: int) -> int:
    """A row's candidates: ``topk`` of 8 bytes, score and block id."""
    return 8 * topk


def share_bytes(num_score_blocks: int, context_ranks: int) -> int:
    """A row's scores of the blocks of one rank: 4 bytes each, as many as the rank with the most holds."""
    return 4 * -(-num_score_blocks // context_ranks)


# ---- Agreement: the ranks make the same call in the same state, and hear how it went on each of them ----
#
# Before a call changes anything that cannot be undone, or returns, every rank sends a header of a fixed size
# to all others:
#
#     8 little-endian 64-bit integers   the fields of :class:`Header`, in their order
#     192 bytes                         its text, in UTF-8

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
        text: the call or the refusal, human-readable.
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
