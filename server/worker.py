"""The one thread that uses the device, and the places of the requests that wait for it.

A request takes a place before its body is read, so that what the server holds is bounded, and keeps it until
its answer is sent. Of the calls that wait, those that are given up, by a deadline or by a client that went
away, are never run.
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

# Until when a request must have reached the device.


@dataclass(frozen=True)
class Deadline:
    """So many seconds after a request came.

    Attributes:
        seconds: the time it has.
        began: ``time.monotonic()`` when it came.
    """

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    def problem(self, detail: str) -> ProblemError:
        """The 504 of a request that was too late."""
        return ProblemError(
            504,
            "deadline",
            detail,
            argument="deadline_seconds",
            value=round(time.monotonic() - self.began, 3),
            limit=self.seconds,
        )


T = TypeVar("T")
_MAX_RETRY_SECONDS = 30.0
_MEAN_WEIGHT = 0.1


class _Job:
    """A call that waits or runs. ``function`` is None once it was taken or given up."""

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any], place: Place | None) -> None:
        self.function: Callable[[], Any] | None = function
        self.future = future
        self.place = place
        self.queued = time.perf_counter()


class Worker:
    """Runs calls one after another, in the order in which they came.

    Args:
        places: requests that may be in the server.
        max_bytes: bytes that their bodies may take together.
    """

    def __init__(self, places: int, max_bytes: int) -> None:
        self.places = places
        self.max_bytes = max_bytes
        self.places_taken = 0
        self.bytes_taken = 0
        self.busy = False
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._mean_seconds = 0.01
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    @property
    def waiting(self) -> int:
        """Calls that wait for the device."""
        return len(self._jobs)

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether the server is being shut down."""
        return self._stopping

    def start(self) -> None:
        """Start the thread, from the event loop that will ask for calls."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, seconds: float) -> bool:
        """Run what waits, then end the thread; False if that takes longer than ``seconds``."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, seconds)
        return not self._thread.is_alive()

    def admit(self) -> Place:
        """Take a place.

        Raises:
            ProblemError: 429, all are taken.
        """
        if self.places_taken >= self.places:
            reason = f"all {self.places} places are taken"
            raise self._full(reason, "queue_places", self.places_taken, self.places)
        self.places_taken += 1
        return Place(self)

    def submit(self, function: Callable[[], T], place: Place | None) -> _Job:
        """Queue a call; None: it is the server's own and takes nobody's place."""
        if self._loop is None:
            raise RuntimeError("the worker was not started")
        job = _Job(function, self._loop.create_future(), place)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        return job

    def give_up(self, job: _Job) -> bool:
        """Take a call back that has not begun; False when it has."""
        with self._changed:
            if job.function is None:
                return False
            job.function = None
            self._jobs.remove(job)
            return True

    def reserve(self, num_bytes: int) -> None:
        """Count bytes of a body that is about to be read.

        Raises:
            ProblemError: 429, the bodies in the server take too much memory already.
        """
        if self.bytes_taken + num_bytes > self.max_bytes and self.bytes_taken:
            reason = f"the bodies in the server take {self.bytes_taken} bytes of {self.max_bytes}"
            raise self._full(reason, "queue_bytes", self.bytes_taken + num_bytes, self.max_bytes)
        self.bytes_taken += num_bytes

    def _full(self, reason: str, argument: str, value: int, limit: int) -> ProblemError:
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
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                function, job.function = job.function, None
                self.busy = True
            began = time.perf_counter()
            result: Any = None
            error: BaseException | None = None
            try:
                if function is not None:
                    result = function()
            except BaseException as raised:  # it belongs to whoever waits for the call
                error = raised
            function = None
            seconds = time.perf_counter() - began
            self._mean_seconds += _MEAN_WEIGHT * (seconds - self._mean_seconds)
            self.busy = False
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_finish, job, result, error, began - job.queued)
            del job, result, error


def _finish(job: _Job, result: Any, error: BaseException | None, waited: float) -> None:
    if job.place is not None:
        job.place.finished()
    if job.future.done():
        return
    if error is None:
        job.future.set_result((result, waited))
    else:
        job.future.set_exception(error)


class Place:
    """A request's place in the server. Everything here but :meth:`check` runs on the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._bytes = 0
        self._running = False
        self._held = True
        self._abandoned = False
        self._released = False

    def reserve(self, num_bytes: int) -> None:
        """See :meth:`Worker.reserve`."""
        self._worker.reserve(num_bytes)
        self._bytes += num_bytes

    async def run(self, function: Callable[[], T], deadline: Deadline, receive: Receive) -> tuple[T, float]:
        """Run a call on the device's thread.

        Args:
            function: the call.
            deadline: until when it must have begun.
            receive: of the request whose body was read, to notice that the client went away.

        Returns:
            What the call returned, and the seconds it waited.

        Raises:
            ProblemError: 504, the deadline passed first; or the client went away. The call was not run, or,
                once it has begun, is finished and its result dropped.
        """
        job = self._worker.submit(function, self)
        self._running = True
        gone = asyncio.ensure_future(_disconnected(receive))
        waiting: set[asyncio.Future[Any]] = {job.future, gone}
        try:
            await asyncio.wait(waiting, timeout=deadline.left(), return_when=asyncio.FIRST_COMPLETED)
            if not job.future.done() and not gone.done():
                if self._give_up(job):
                    raise deadline.problem("the deadline passed in the queue; nothing was done")
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not job.future.done():
                self._abandon(job)
                raise _gone_away()
            result: tuple[T, float] = job.future.result()
            return result
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        finally:
            gone.cancel()
            if not job.future.done():
                job.future.cancel()

    def check(self, deadline: Deadline) -> None:
        """Called on the device's thread, between the parts of a call that has several.

        Raises:
            ProblemError: 504, ``deadline`` has passed; or nobody waits for the answer any more.
        """
        if self._abandoned:
            raise _gone_away()
        if not deadline.left():
            raise deadline.problem("the deadline passed between two runs; ask for fewer")

    def _abandon(self, job: _Job) -> None:
        self._abandoned = True
        self._give_up(job)

    def _give_up(self, job: _Job) -> bool:
        given_up = self._worker.give_up(job)
        if given_up:
            self._running = False
        return given_up

    def finished(self) -> None:
        """The call is over."""
        self._running = False
        self._free()

    def release(self) -> None:
        """The request is over. The place is free once its call is, too."""
        self._held = False
        self._free()

    def _free(self) -> None:
        if not self._held and not self._running and not self._released:
            self._released = True
            self._worker.places_taken -= 1
            self._worker.bytes_taken -= self._bytes


def _gone_away() -> ProblemError:
    return ProblemError(499, "disconnected", "the client went away before the answer")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
