"""The client for asynchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TypeVar

import httpx

from client import calls
from client.call import Call, Reply
from client.calls import CacheUse, Order
from client.connection import DEFAULT_RETRY_SECONDS, DEFAULT_TIMEOUT, DEFAULT_URL, Connection
from client.records import CacheState, Health, Readiness, ServerInfo
from client.tries import Tries
from indexer.case import Case
from indexer.case.container import Array
from indexer.wire import Profile, ScoreReply

T = TypeVar("T")


class AsyncClient:
    """:class:`client.Client` with coroutines: the same arguments, results and errors.

    Args:
        url: the server's root.
        token: bearer token. It travels as it is: use https, or a network that nobody else reads.
        timeout: seconds without any progress after which a call is given up.
        retry_seconds: most seconds that a call waits for a busy server; 0: it is asked once.
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

    async def health(self) -> Health:
        """Whether the process answers. It may not be ready."""
        return await self._run(calls.health())

    async def ready(self) -> Readiness:
        """Whether the server passed its self-test; waits while it warms up, then raises ``NotReadyError``."""
        return await self._run(calls.ready())

    async def info(self) -> ServerInfo:
        """What serves: backend, device, geometry, defaults, limits."""
        return await self._run(calls.info())

    async def cache(self) -> CacheState:
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
        tries = Tries(call, self._connection.retry_seconds)
        while (wait := tries.take(await self._attempt(call))) is not None:
            await asyncio.sleep(wait)
        return tries.result

    async def _attempt(self, call: Call[T]) -> Reply | httpx.TransportError:
        content = _chunks(call) if call.body else None
        request = self._http.build_request(
            call.method, call.path.lstrip("/"), params=call.query, headers=call.headers, content=content
        )
        try:
            response = await self._http.send(request, stream=True)
            try:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            return error
        return Reply(response.status_code, response.headers, body)


async def _chunks(call: Call[T]) -> AsyncIterator[bytes]:
    for chunk in call.chunks():
        yield chunk
