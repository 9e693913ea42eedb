"""The synchronous and the asynchronous client; they differ in how a call is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import httpx

from client import calls
from client.calls import CacheUse, Call, Order, Reply
from client.transport import DEFAULT_RETRY_SECONDS, DEFAULT_TIMEOUT, DEFAULT_URL, Connection, RetryPolicy
from indexer.case import Case
from indexer.case.container import Array
from indexer.wire import Alive, CacheInfo, Info, Profile, Ready, ScoreReply
from kernel.errors import InvalidArgumentError

T = TypeVar("T")


class Client:
    """An ``IndexScorer`` in a server: the same methods, in numpy. Imports no torch; threads may share it.

    Every method raises what the scorer would (``InvalidArgumentError``, ``UnknownSequenceError``,
    ``OutOfPagesError``), or an error of :mod:`client.errors`: ``ServerConnectionError``, ``ServerError``.

    Calls that a busy or warming server refuses are retried after the time that it hints. A call whose answer
    was lost is resent if that does no harm: all but :meth:`add_sequence`, :meth:`fork_sequence` and
    :meth:`append_keys` without ``start``.

    Args:
        url: the server's root.
        token: bearer token. It travels as it is: use https, or a network that nobody else reads.
        timeout: seconds without progress after which a call fails.
        retry_seconds: longest time that a call waits for a busy server; 0: no retries.
        transport: another way to the server than TCP, as httpx takes it.

    Raises:
        InvalidArgumentError: an argument cannot be used.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retry_seconds: float = DEFAULT_RETRY_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connection = Connection(url, token, timeout, retry_seconds)
        self._http = httpx.Client(**self._connection.options(), transport=transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Sequences live on in the server."""
        self._http.close()

    def health(self) -> Alive:
        """Whether the process answers. It may not be ready."""
        return self._run(calls.health())

    def ready(self) -> Ready:
        """Whether the server passed its self-test; waits while it warms up, then raises ``NotReadyError``."""
        return self._run(calls.ready())

    def info(self) -> Info:
        """What serves: backend, device, geometry, defaults, limits."""
        return self._run(calls.info())

    def cache(self) -> CacheInfo:
        """How full the cache is, and this token's sequences."""
        return self._run(calls.cache())

    def add_sequence(self) -> str:
        """Make an empty sequence and return its id."""
        return self._run(calls.add_sequence()).id

    def sequence_length(self, sequence: str) -> int:
        """Tokens of a sequence."""
        return self._run(calls.sequence_state(sequence)).length

    def append_keys(self, sequence: str, k: Array, *, start: int | None = None) -> int:
        """Quantise index keys to NVFP4 and append them, all or none.

        Args:
            sequence: a live sequence.
            k: ``[n, 128]`` bfloat16, float16 or float32, finite.
            start: tokens that the sequence holds. With it the call is resent after a lost answer. Keys that
                had arrived are not appended again.

        Returns:
            The sequence's new length, tokens.

        Raises:
            LengthConflictError: it does not hold ``start`` tokens, and these keys were not the last appended.
        """
        return self._run(calls.append_keys(sequence, k, start)).length

    def fork_sequence(self, sequence: str) -> str:
        """Make a sequence with the same keys and return its id."""
        return self._run(calls.fork_sequence(sequence)).id

    def free_sequence(self, sequence: str) -> None:
        """Drop a sequence."""
        self._run(calls.free_sequence(sequence))

    def score(
        self,
        q: Array,
        sequences: Sequence[str],
        query_lens: Sequence[int] | None = None,
        *,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> ScoreReply:
        """Score the last positions of sequences against their keys and select each row's best blocks.

        Args:
            q: ``[total_q, H, 128]`` float8_e4m3fn, bfloat16, float16 or float32, finite; the rows of the
                sequences one after another.
            sequences: live sequences; one may be named several times.
            query_lens: queries of each. None: all rows belong to the only one, or each of several has one.
            return_scores: whether the answer holds the scores, too.
            topk: blocks to select, 1 to ``MAX_TOPK`` (64). The server's setting when None, like the rest.
            init_blocks: blocks forced at a row's start.
            local_blocks: blocks forced at a row's end.
            order: ``score``, best first, or ``block``, ids ascending.
        """
        options = calls.score_options(topk, init_blocks, local_blocks, order, return_scores)
        return self._run(calls.score(q, sequences, query_lens, options))

    def score_case(
        self,
        case: Case,
        *,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> ScoreReply:
        """Score a case; touches no sequence. Options take the place of what the case says."""
        options = calls.score_options(topk, init_blocks, local_blocks, order, return_scores)
        return self._run(calls.score_case(case, options))

    def profile(
        self,
        case: Case,
        *,
        cache: CacheUse = "cold",
        repeats: int = 5,
        return_scores: bool = False,
        trace: bool = False,
    ) -> Profile:
        """Run a case several times in the server and say where the time goes.

        Args:
            case: the call.
            cache: ``cold``: the device's caches are flushed before each run; or ``warm``.
            repeats: runs that are measured, 1 to 100, after one that is not.
            return_scores: whether the scores are kept, as a caller that wants them would.
            trace: whether to add a chrome trace of one more run.
        """
        return self._run(calls.profile(case, calls.profile_options(cache, repeats, return_scores, trace)))

    def _run(self, call: Call[T]) -> T:
        self._connection.check_open(self._http.is_closed)
        policy = RetryPolicy(call, self._connection.retry_seconds)
        while (wait := policy.wait_after(self._attempt(call))) is not None:
            time.sleep(wait)
        return policy.result

    def _attempt(self, call: Call[T]) -> Reply | httpx.TransportError:
        body = bytearray()
        try:
            with self._http.stream(**call.request, content=call.chunks() if call.body else None) as response:
                for chunk in response.iter_raw():
                    body += chunk
        except httpx.TransportError as error:
            return error
        return Reply(response.status_code, response.headers, body)


class AsyncClient:
    """:class:`client.Client` with coroutines: the same arguments, results and errors."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retry_seconds: float = DEFAULT_RETRY_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = Connection(url, token, timeout, retry_seconds)
        self._http = httpx.AsyncClient(**self._connection.options(), transport=transport)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Sequences live on in the server."""
        await self._http.aclose()

    async def health(self) -> Alive:
        """Whether the process answers. It may not be ready."""
        return await self._run(calls.health())

    async def ready(self) -> Ready:
        """Whether the server passed its self-test; waits while it warms up, then raises ``NotReadyError``."""
        return await self._run(calls.ready())

    async def info(self) -> Info:
        """What serves: backend, device, geometry, defaults, limits."""
        return await self._run(calls.info())

    async def cache(self) -> CacheInfo:
        """How full the cache is, and this token's sequences."""
        return await self._run(calls.cache())

    async def add_sequence(self) -> str:
        """Make an empty sequence and return its id."""
        return (await self._run(calls.add_sequence())).id

    async def sequence_length(self, sequence: str) -> int:
        """Tokens of a sequence."""
        return (await self._run(calls.sequence_state(sequence))).length

    async def append_keys(self, sequence: str, k: Array, *, start: int | None = None) -> int:
        """See :meth:`client.Client.append_keys`."""
        return (await self._run(calls.append_keys(sequence, k, start))).length

    async def fork_sequence(self, sequence: str) -> str:
        """Make a sequence with the same keys and return its id."""
        return (await self._run(calls.fork_sequence(sequence))).id

    async def free_sequence(self, sequence: str) -> None:
        """Drop a sequence."""
        await self._run(calls.free_sequence(sequence))

    async def score(
        self,
        q: Array,
        sequences: Sequence[str],
        query_lens: Sequence[int] | None = None,
        *,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> ScoreReply:
        """See :meth:`client.Client.score`."""
        options = calls.score_options(topk, init_blocks, local_blocks, order, return_scores)
        return await self._run(calls.score(q, sequences, query_lens, options))

    async def score_case(
        self,
        case: Case,
        *,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> ScoreReply:
        """Score a case; touches no sequence. Options take the place of what the case says."""
        options = calls.score_options(topk, init_blocks, local_blocks, order, return_scores)
        return await self._run(calls.score_case(case, options))

    async def profile(
        self,
        case: Case,
        *,
        cache: CacheUse = "cold",
        repeats: int = 5,
        return_scores: bool = False,
        trace: bool = False,
    ) -> Profile:
        """See :meth:`client.Client.profile`."""
        return await self._run(
            calls.profile(case, calls.profile_options(cache, repeats, return_scores, trace))
        )

    async def _run(self, call: Call[T]) -> T:
        self._connection.check_open(self._http.is_closed)
        policy = RetryPolicy(call, self._connection.retry_seconds)
        while (wait := policy.wait_after(await self._attempt(call))) is not None:
            await asyncio.sleep(wait)
        return policy.result

    async def _attempt(self, call: Call[T]) -> Reply | httpx.TransportError:
        content = _chunks(call) if call.body else None
        body = bytearray()
        try:
            async with self._http.stream(**call.request, content=content) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
        except httpx.TransportError as error:
            return error
        return Reply(response.status_code, response.headers, body)


async def _chunks(call: Call[T]) -> AsyncIterator[bytes]:
    for chunk in call.chunks():
        yield chunk


@contextmanager
def remote_client(url: str, token: str | None, backend: str, precision: str) -> Iterator[Client]:
    """Opens a client of the sidecar that a command names.

    Args:
        url: the sidecar's root.
        token: its token.
        backend: the command's ``--backend``, which the sidecar chose when it started.
        precision: the command's ``--precision``, likewise.

    Raises:
        InvalidArgumentError: a backend or precision is given, too, or the URL cannot be used.
    """
    for option, value, default in (("--backend", backend, "auto"), ("--precision", precision, "exact")):
        if value != default:
            raise InvalidArgumentError(
                option, value, "the sidecar chose its own", f"leave out {option}, or --url"
            )
    with Client(url, token=token or None) as client:
        yield client
