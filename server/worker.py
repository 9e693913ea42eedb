"""The device's thread and the admission queue before it.

A request takes a slot of the queue before its body is read, which bounds what the server holds, and keeps it
until its answer begins. Calls run one after another. Their owners, who are bearer tokens, take turns; each
owner's calls keep the order of their arrival. A call that still waits when its deadline passes or its client
disconnects is never run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from server.problems import ProblemError

T = TypeVar("T")
_MAX_RETRY_SECONDS = 30.0
_MEAN_WEIGHT = 0.1
"""Weight of the last call in the mean duration that Retry-After is computed from."""


@dataclass(frozen=True)
class Deadline:
    """A request's deadline.

    Attributes:
        seconds: time from the request's arrival.
        began: ``time.monotonic()`` at its arrival.
    """

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Returns the seconds left, at least 0."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    def problem(self, detail: str) -> ProblemError:
        """Returns the 504 of a request that missed it."""
        return ProblemError(
            504,
            "deadline",
            detail,
            argument="deadline_seconds",
            value=round(time.monotonic() - self.began, 3),
            limit=self.seconds,
        )


@dataclass(eq=False)
class _Job:
    """A queued or running call. ``function`` is None once it was started or withdrawn."""

    function: Callable[[], Any] | None
    owner: str
    future: asyncio.Future[Any]
    slot: QueueSlot | None
    queued: float = field(default_factory=time.perf_counter)


class Worker:
    """The device's thread with its admission queue.

    Args:
        slots: requests that may be in the server.
        max_bytes: bytes that their bodies may take together.

    Attributes:
        busy: whether a call runs.
        shared: whether there are several owners. Then none of them may take more of the slots, nor of the
            bytes with several bodies, than it leaves free, so that there is always some for another one.
        stopping: whether the server is shutting down.
    """

    def __init__(self, slots: int, max_bytes: int) -> None:
        self.slots = slots
        self.max_bytes = max_bytes
        self.shared = False
        self.bytes_taken = 0
        self.busy = False
        self._admitted: set[QueueSlot] = set()
        self._jobs: dict[str, deque[_Job]] = {}
        """Waiting calls by owner; the first owner is served next."""
        self._changed = threading.Condition()
        self.stopping = False
        self._mean_seconds = 0.01
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    @property
    def waiting(self) -> int:
        """Calls that wait for the device."""
        return sum(map(len, list(self._jobs.values())))

    @property
    def slots_taken(self) -> int:
        """Requests in the server."""
        return len(self._admitted)

    @property
    def oldest_arrival(self) -> float:
        """``time.monotonic()`` when the oldest request in the server arrived; now, if there is none."""
        arrivals = (slot.deadline.began for slot in tuple(self._admitted))
        return min(arrivals, default=time.monotonic())

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread; called on the event loop that submits calls."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, seconds: float) -> bool:
        """Runs what waits, then ends the thread; returns False if that takes longer than ``seconds``."""
        with self._changed:
            self.stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, seconds)
        return not self._thread.is_alive()

    def admit(self, deadline: Deadline, owner: str = "") -> QueueSlot:
        """Takes a slot of the queue.

        Raises:
            ProblemError: 429, all are taken, or all but those that this owner must leave to others.
        """
        own = sum(slot.owner == owner for slot in self._admitted)
        free = self.slots - self.slots_taken
        if free <= 0 or (self.shared and own >= free):
            reason = f"all {self.slots} places are taken"
            if free > 0:
                reason = f"{own} of {self.slots} places are this token's, {free} are left to others"
            raise self.busy_problem(reason, "queue_places", self.slots_taken, self.slots)
        slot = QueueSlot(self, deadline, owner)
        self._admitted.add(slot)
        return slot

    def leave(self, slot: QueueSlot, num_bytes: int) -> None:
        """Takes back a slot, and what was counted of its body."""
        self._admitted.discard(slot)
        self.bytes_taken -= num_bytes

    def bytes_of(self, owner: str) -> int:
        """Returns the bytes of an owner's bodies."""
        return sum(slot.num_bytes for slot in self._admitted if slot.owner == owner)

    def submit(self, function: Callable[[], Any], slot: QueueSlot | None = None) -> _Job:
        """Queues a call. Its future yields the result and the seconds it waited.

        Args:
            function: the call.
            slot: of the request that it belongs to; None for the server's own calls.
        """
        if self._loop is None:
            raise RuntimeError("the worker was not started")
        owner = "" if slot is None else slot.owner
        job = _Job(function, owner, self._loop.create_future(), slot)
        with self._changed:
            self._jobs.setdefault(owner, deque()).append(job)
            self._changed.notify()
        return job

    def withdraw(self, job: _Job) -> bool:
        """Takes a waiting call out of the queue; returns False if it has begun."""
        with self._changed:
            if job.function is None:
                return False
            job.function = None
            self._jobs[job.owner].remove(job)
            if not self._jobs[job.owner]:
                del self._jobs[job.owner]
            return True

    def busy_problem(self, reason: str, argument: str, value: int, limit: int) -> ProblemError:
        """Returns the 429 of a request, with the time after which to come back."""
        seconds = min(_MAX_RETRY_SECONDS, max(0.02, self._mean_seconds * (self.waiting + 1)))
        return ProblemError(
            429,
            "busy",
            f"{reason}; nothing was done, try again after the time given",
            {"Retry-After": str(-int(-seconds // 1))},
            argument=argument,
            value=value,
            limit=limit,
            retry_after_seconds=round(seconds, 3),
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self.stopping:
                        return
                    self._changed.wait()
                owner = next(iter(self._jobs))
                waiting = self._jobs.pop(owner)
                job = waiting.popleft()
                if waiting:
                    self._jobs[owner] = waiting  # behind the others
                function, job.function = job.function, None
                self.busy = True
            began = time.perf_counter()
            result: Any = None
            error: BaseException | None = None
            try:
                if function is not None:
                    result = function()
            except BaseException as raised:  # it belongs to whoever awaits the call
                error = raised
            function = None
            seconds = time.perf_counter() - began
            self._mean_seconds += _MEAN_WEIGHT * (seconds - self._mean_seconds)
            self.busy = False
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_finish, job, result, error, began - job.queued)
            del job, result, error


def _finish(job: _Job, result: Any, error: BaseException | None, waited: float) -> None:
    if job.slot is not None:
        job.slot.finished()
    if job.future.done():
        return
    if error is None:
        job.future.set_result((result, waited))
    else:
        job.future.set_exception(error)


class QueueSlot:
    """A request's slot of the admission queue. All but :meth:`check` runs on the event loop.

    Args:
        worker: whose queue it is.
        deadline: until when the request's call must have begun.
        owner: whose request it is.

    Attributes:
        num_bytes: what has arrived of its body.
    """

    def __init__(self, worker: Worker, deadline: Deadline, owner: str) -> None:
        self.deadline = deadline
        self.owner = owner
        self.num_bytes = 0
        self._worker = worker
        self._running = False
        self._held = True
        self._abandoned = False
        self._released = False

    def check_room(self, num_bytes: int) -> None:
        """Refuses bytes of the body for which there is no memory beside those of others.

        Raises:
            ProblemError: 429, the bodies in the server take too much memory already.
        """
        worker = self._worker
        total = worker.bytes_taken + num_bytes
        full = total > worker.max_bytes and worker.bytes_taken > self.num_bytes
        own = worker.bytes_of(self.owner) if worker.shared else 0
        if own > self.num_bytes and own + total > worker.max_bytes:
            full = True  # the owner has several bodies here, and would leave less than it takes
        if full:
            reason = f"the bodies in the server take {worker.bytes_taken} bytes of {worker.max_bytes}"
            raise worker.busy_problem(reason, "queue_bytes", total, worker.max_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Counts bytes of the body that have arrived.

        Raises:
            ProblemError: as :meth:`check_room`.
        """
        self.check_room(num_bytes)
        self._worker.bytes_taken += num_bytes
        self.num_bytes += num_bytes

    async def run(self, function: Callable[[], T], receive: Receive) -> tuple[T, float]:
        """Runs a call on the device's thread.

        Args:
            function: the call.
            receive: of the request, whose body was read: tells when its client disconnects.

        Returns:
            The call's result, and the seconds it waited.

        Raises:
            ProblemError: 504, the deadline passed in the queue; or the client disconnected. The call was not
                run, or, once begun, is finished and its result dropped.
        """
        job = self._worker.submit(function, self)
        self._running = True
        gone = asyncio.ensure_future(_disconnected(receive))
        waiting: set[asyncio.Future[Any]] = {job.future, gone}
        try:
            await asyncio.wait(waiting, timeout=self.deadline.left(), return_when=asyncio.FIRST_COMPLETED)
            if not job.future.done() and not gone.done():
                if self._withdraw(job):
                    raise self.deadline.problem("the deadline passed in the queue; nothing was done")
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not job.future.done():
                self._abandon(job)
                raise _client_gone()
            result: tuple[T, float] = job.future.result()
            return result
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        finally:
            gone.cancel()
            if not job.future.done():
                job.future.cancel()

    def check(self, seconds: float = 0.0) -> None:
        """Ends a call of several parts between two of them; called on the device's thread.

        Args:
            seconds: time that the next part may take.

        Raises:
            ProblemError: 504, the deadline passed, or would within the next part; or nobody waits for the
                answer any more.
        """
        if self._abandoned:
            raise _client_gone()
        if self.deadline.left() <= seconds:
            raise self.deadline.problem("the deadline would pass in the next of several runs; ask for fewer")

    def finished(self) -> None:
        """Marks the call as over."""
        self._running = False
        self._free()

    def release(self) -> None:
        """Marks the request as answered. The slot is free once its call is over, too."""
        self._held = False
        self._free()

    def _abandon(self, job: _Job) -> None:
        self._abandoned = True
        self._withdraw(job)

    def _withdraw(self, job: _Job) -> bool:
        withdrawn = self._worker.withdraw(job)
        if withdrawn:
            self._running = False
        return withdrawn

    def _free(self) -> None:
        if not self._held and not self._running and not self._released:
            self._released = True
            self._worker.leave(self, self.num_bytes)


def _client_gone() -> ProblemError:
    return ProblemError(499, "disconnected", "the client went away before the answer")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
