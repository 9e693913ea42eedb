"""The admission queue and the device's thread: order, deadlines, disconnects, draining. No server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.types import Message

from server.problems import ProblemError
from server.worker import Deadline, QueueSlot, Worker

SOON = 30.0


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("never set")


async def _gone() -> Message:
    return {"type": "http.disconnect"}


def _blocked(release: threading.Event) -> Callable[[], str]:
    def call() -> str:
        assert release.wait(SOON)
        return "done"

    return call


def run(scenario: Callable[[Worker], Awaitable[None]], slots: int = 8, max_bytes: int = 1000) -> None:
    """Run a scenario on a started worker and stop it."""

    async def main() -> None:
        worker = Worker(slots, max_bytes)
        worker.start()
        try:
            await scenario(worker)
        finally:
            assert await worker.stop(SOON)

    asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def _occupied(worker: Worker) -> AsyncIterator[None]:
    """The device is busy with a call, which ends behind the block."""
    release = threading.Event()
    call = asyncio.ensure_future(worker.admit(Deadline(SOON)).run(_blocked(release), _never))
    await _until(lambda: worker.busy)
    try:
        yield
    finally:
        release.set()
    assert (await call)[0] == "done"


def test_calls_run_one_at_a_time_in_order_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario(worker: Worker) -> None:
        def call(number: int) -> int:
            seen.append((number, threading.get_ident()))
            return number

        jobs = [
            worker.admit(Deadline(SOON)).run(lambda number=number: call(number), _never)  # type: ignore[misc]
            for number in range(8)
        ]
        results = await asyncio.gather(*jobs)
        assert [result for result, _ in results] == list(range(8))

    run(scenario)
    assert [number for number, _ in seen] == list(range(8))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_a_full_queue_says_when_to_come_back() -> None:
    async def scenario(worker: Worker) -> None:
        slots = [worker.admit(Deadline(SOON)), worker.admit(Deadline(SOON))]
        with pytest.raises(ProblemError, match="places are taken") as raised:
            worker.admit(Deadline(SOON))
        assert raised.value.status == 429
        assert int(raised.value.headers["Retry-After"]) >= 1
        members = raised.value.members
        assert 0 < members["retry_after_seconds"] <= 30
        assert (members["argument"], members["value"], members["limit"]) == ("queue_places", 2, 2)
        slots[0].release()
        slots[0].release()
        worker.admit(Deadline(SOON))
        with pytest.raises(ProblemError):
            worker.admit(Deadline(SOON))

    run(scenario, slots=2)


def test_bodies_are_bounded_together() -> None:
    async def scenario(worker: Worker) -> None:
        first, second = worker.admit(Deadline(SOON)), worker.admit(Deadline(SOON))
        first.reserve(900)
        with pytest.raises(ProblemError, match="900 bytes of 1000") as raised:
            second.reserve(101)
        assert raised.value.status == 429
        members = raised.value.members
        assert (members["argument"], members["value"], members["limit"]) == ("queue_bytes", 1001, 1000)
        second.reserve(100)
        first.release()
        assert worker.bytes_taken == 100

    run(scenario)


def test_a_single_body_may_exceed_the_bound_of_all() -> None:
    async def scenario(worker: Worker) -> None:
        worker.admit(Deadline(SOON)).reserve(5000)

    run(scenario)


def test_a_call_past_its_deadline_is_not_run() -> None:
    ran: list[int] = []

    async def scenario(worker: Worker) -> None:
        async with _occupied(worker):
            second = worker.admit(Deadline(0.05))
            with pytest.raises(ProblemError) as raised:
                await second.run(lambda: ran.append(1), _never)
            assert (raised.value.status, raised.value.kind) == (504, "deadline")
            members = raised.value.members
            assert (members["argument"], members["limit"]) == ("deadline_seconds", 0.05)
            assert members["value"] >= 0.05
            second.release()
            assert worker.slots_taken == 1

    run(scenario)
    assert not ran


def test_a_call_that_has_begun_is_finished_after_its_deadline() -> None:
    async def scenario(worker: Worker) -> None:
        release = threading.Event()
        call = asyncio.ensure_future(worker.admit(Deadline(0.05)).run(_blocked(release), _never))
        await asyncio.sleep(0.2)
        assert not call.done()
        release.set()
        assert (await call)[0] == "done"

    run(scenario)


def test_a_client_that_goes_away_frees_its_slot_and_its_call() -> None:
    ran: list[int] = []

    async def scenario(worker: Worker) -> None:
        async with _occupied(worker):
            second = worker.admit(Deadline(SOON))
            with pytest.raises(ProblemError) as raised:
                await second.run(lambda: ran.append(1), _gone)
            assert raised.value.kind == "disconnected"
            assert worker.waiting == 0
            second.release()
            assert worker.slots_taken == 1

    run(scenario)
    assert not ran


def test_a_running_call_keeps_its_slot_though_its_client_is_gone() -> None:
    async def scenario(worker: Worker) -> None:
        release = threading.Event()
        slot = worker.admit(Deadline(SOON))
        leave = asyncio.Event()

        async def receive() -> Message:
            await leave.wait()
            return {"type": "http.disconnect"}

        call = asyncio.ensure_future(slot.run(_blocked(release), receive))
        await _until(lambda: worker.busy)
        leave.set()
        with pytest.raises(ProblemError, match="went away"):
            await call
        slot.release()
        assert worker.slots_taken == 1, "the device is still busy with it"
        release.set()
        await _until(lambda: worker.slots_taken == 0)

    run(scenario)


def test_a_call_of_several_parts_ends_between_two_of_them() -> None:
    parts: list[str] = []

    def call(slot: QueueSlot, begun: threading.Event) -> Callable[[], None]:
        def work() -> None:
            for _ in range(1000):
                slot.check()
                parts.append("part")
                begun.set()
                time.sleep(0.02)

        return work

    async def scenario(worker: Worker) -> None:
        late = worker.admit(Deadline(0.1))
        with pytest.raises(ProblemError, match="next of several runs") as raised:
            await late.run(call(late, threading.Event()), _never)
        assert raised.value.status == 504
        left, begun = worker.admit(Deadline(SOON)), threading.Event()

        async def receive() -> Message:
            await asyncio.to_thread(begun.wait, SOON)
            return {"type": "http.disconnect"}

        with pytest.raises(ProblemError, match="went away"):
            await left.run(call(left, begun), receive)
        for slot in (late, left):
            slot.release()
        await _until(lambda: worker.slots_taken == 0)

    run(scenario)
    assert 0 < len(parts) < 1000


def test_a_cancelled_request_takes_its_call_back() -> None:
    ran: list[int] = []

    async def scenario(worker: Worker) -> None:
        async with _occupied(worker):
            second = asyncio.ensure_future(worker.admit(Deadline(SOON)).run(lambda: ran.append(1), _never))
            await asyncio.sleep(0.02)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second

    run(scenario)
    assert not ran


def test_errors_reach_their_own_call_only() -> None:
    async def scenario(worker: Worker) -> None:
        def fails() -> None:
            raise KeyError("mine")

        good, bad = (worker.admit(Deadline(SOON)) for _ in range(2))
        results = await asyncio.gather(
            bad.run(fails, _never),
            good.run(lambda: 7, _never),
            return_exceptions=True,
        )
        assert isinstance(results[0], KeyError)
        assert isinstance(results[1], tuple)
        assert results[1][0] == 7

    run(scenario)


def test_stopping_runs_what_waits() -> None:
    async def main() -> None:
        worker = Worker(8, 1000)
        worker.start()
        release = threading.Event()
        first = asyncio.ensure_future(worker.admit(Deadline(SOON)).run(_blocked(release), _never))
        second = asyncio.ensure_future(worker.admit(Deadline(SOON)).run(lambda: 2, _never))
        await _until(lambda: worker.waiting == 1)
        stopping = asyncio.ensure_future(worker.stop(SOON))
        await asyncio.sleep(0.02)
        release.set()
        assert await stopping
        assert (await first)[0] == "done"
        assert (await second)[0] == 2

    asyncio.run(main())


def test_stopping_does_not_wait_for_ever() -> None:
    async def main() -> None:
        worker = Worker(8, 1000)
        worker.start()
        release = threading.Event()
        slot = worker.admit(Deadline(SOON))
        call = asyncio.ensure_future(slot.run(_blocked(release), _never))
        await _until(lambda: worker.busy)
        assert not await worker.stop(0.05)
        release.set()
        await call

    asyncio.run(main())


# ---- Several owners ----


def test_owners_take_turns() -> None:
    seen: list[str] = []

    async def scenario(worker: Worker) -> None:
        calls = []
        async with _occupied(worker):
            for owner in ("hog", "hog", "hog", "modest", "late", "modest"):
                slot = worker.admit(Deadline(SOON), owner)
                call = slot.run(lambda owner=owner: seen.append(owner), _never)  # type: ignore[misc]
                calls.append(asyncio.ensure_future(call))
                await asyncio.sleep(0)
            assert worker.waiting == 6
        await asyncio.gather(*calls)

    run(scenario, slots=16)
    assert seen == ["hog", "modest", "late", "hog", "modest", "hog"]


def test_an_owner_leaves_as_many_places_as_it_takes() -> None:
    async def scenario(worker: Worker) -> None:
        worker.shared = True
        taken = {}
        for owner in ("first", "second", "third"):
            taken[owner] = 0
            with contextlib.suppress(ProblemError):
                while True:
                    worker.admit(Deadline(SOON), owner)
                    taken[owner] += 1
        assert taken == {"first": 8, "second": 4, "third": 2}
        with pytest.raises(ProblemError, match="left to others") as raised:
            worker.admit(Deadline(SOON), "first")
        assert raised.value.status == 429
        worker.shared = False
        worker.admit(Deadline(SOON), "first")

    run(scenario, slots=16)


def test_an_owner_leaves_as_many_bytes_as_it_takes() -> None:
    async def scenario(worker: Worker) -> None:
        worker.shared = True
        worker.admit(Deadline(SOON), "first").reserve(300)
        with pytest.raises(ProblemError, match="300 bytes of 1000"):
            worker.admit(Deadline(SOON), "first").reserve(401)
        worker.admit(Deadline(SOON), "second").reserve(700)

    run(scenario)


def test_the_oldest_request_in_the_server_is_known() -> None:
    async def scenario(worker: Worker) -> None:
        before = time.monotonic()
        assert worker.oldest_arrival >= before
        slots = [worker.admit(Deadline(SOON, began)) for began in (before - 1, before - 5, before - 2)]
        assert worker.oldest_arrival == before - 5
        slots[1].release()
        assert worker.oldest_arrival == before - 2

    run(scenario)


def test_a_part_that_would_pass_the_deadline_does_not_begin() -> None:
    async def scenario(worker: Worker) -> None:
        slot = worker.admit(Deadline(SOON))
        slot.check(SOON / 2)
        with pytest.raises(ProblemError, match="next of several runs"):
            slot.check(SOON + 1)

    run(scenario)
