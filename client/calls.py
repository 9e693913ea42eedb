"""Every call of the server's API as a value: the request, how its answer is read, whether it may be resent.

Pure functions from arguments to a :class:`Call`; :mod:`client.transport` decides about retries, and
:mod:`client.client` sends them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar
from urllib.parse import quote

import numpy as np
from pydantic import TypeAdapter, ValidationError

from client.errors import BadReplyError
from indexer.case import Case, case_buffers
from indexer.case.container import DTYPES, Array, Buffer
from indexer.wire import (
    BINARY,
    JSON,
    Alive,
    CacheInfo,
    Info,
    Profile,
    Ready,
    ScoreReply,
    SequenceInfo,
    SequencesCall,
    decode_reply,
    encode_keys,
    encode_sequences_call,
)
from kernel.arguments import check_bool, check_int, check_unmasked
from kernel.contract import MAX_SEQ_LEN
from kernel.errors import CaseFileError, IndexerError, InvalidArgumentError, UnknownSequenceError

T = TypeVar("T")
Order = Literal["score", "block"]
CacheUse = Literal["cold", "warm"]
OptionValue = int | str | bool | None

_CHUNK_BYTES = 1 << 20
_MAX_ID_CHARS = 64
"""Of a sequence: four times what servers give out, and far less than they read of a path."""
_KEY_DTYPES = tuple(DTYPES[name] for name in ("BF16", "F16", "F32"))
_QUERY_DTYPES = (*_KEY_DTYPES, DTYPES["F8_E4M3"])
_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""Validators of answers, each built at its first use: that takes longer than reading an answer."""


def _raise(error: IndexerError) -> NoReturn:
    raise error


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """A request and how its answer is read.

    Attributes:
        method: HTTP method.
        path: path below the server's URL.
        parse: makes the result from the body of a successful answer.
        query: query parameters.
        body: buffers of a binary body, sent one after another; empty for no body.
        accept: media type of the answer.
        repeatable: whether it may be resent after its answer was lost, and it may have been executed.
        after_lost: makes the result from an error when an earlier answer was lost, or raises the error.
    """

    method: str
    path: str
    parse: Callable[[bytearray], T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    accept: str = JSON
    repeatable: bool = False
    after_lost: Callable[[IndexerError], T] = _raise

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of httpx for the request, but for its body."""
        headers = {"Accept": self.accept}
        if self.body:
            headers["Content-Type"] = BINARY
            headers["Content-Length"] = str(sum(len(buffer) for buffer in self.body))
        return {
            "method": self.method,
            "url": self.path.lstrip("/"),  # below the path of the server's URL
            "params": self.query,
            "headers": headers,
        }

    def chunks(self) -> Iterator[bytes]:
        """Yields the body in parts of at most 1 MiB, so that a large tensor is never copied as a whole."""
        for buffer in self.body:
            view = memoryview(buffer)
            for start in range(0, len(view), _CHUNK_BYTES):
                yield bytes(view[start : start + _CHUNK_BYTES])


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


def record(kind: type[T], body: bytes | bytearray) -> T:
    """Reads a JSON answer. Members that this client does not know are ignored.

    Raises:
        BadReplyError: a member is missing or of another type.
    """
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    adapter: TypeAdapter[T] = _adapters[kind]
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise BadReplyError(
            f"{where}: {first['msg']}; ask a server of this version, at the URL of its root"
        ) from error


def health() -> Call[Alive]:
    """Whether the process answers."""
    return _get("/healthz", Alive)


def ready() -> Call[Ready]:
    """Whether the self-test passed."""
    return _get("/readyz", Ready)


def info() -> Call[Info]:
    """What serves."""
    return _get("/v1/info", Info)


def cache() -> Call[CacheInfo]:
    """How full the cache is."""
    return _get("/v1/cache", CacheInfo)


def sequence_state(sequence: str) -> Call[SequenceInfo]:
    """A sequence's length."""
    return _get(_path(sequence), SequenceInfo)


def add_sequence() -> Call[SequenceInfo]:
    """Make an empty sequence."""
    return Call(method="POST", path="/v1/sequences", parse=_sequence)


def fork_sequence(sequence: str) -> Call[SequenceInfo]:
    """Make a sequence with the same keys."""
    return Call(method="POST", path=f"{_path(sequence)}/fork", parse=_sequence)


def free_sequence(sequence: str) -> Call[None]:
    """Drop a sequence. If it is gone when the call is resent, the call has succeeded."""

    def gone(error: IndexerError) -> None:
        if not isinstance(error, UnknownSequenceError):
            raise error

    return Call(method="DELETE", path=_path(sequence), parse=lambda _: None, repeatable=True, after_lost=gone)


def append_keys(sequence: str, k: Array, start: int | None) -> Call[SequenceInfo]:
    """Append keys. With ``start`` the server appends them once and knows them again: it may be resent."""
    keys = _array("k", k, _KEY_DTYPES)
    return Call(
        method="POST",
        path=f"{_path(sequence)}/keys",
        query=_query(start=_whole("start", start)),
        body=encode_keys(keys),
        parse=_sequence,
        repeatable=start is not None,
    )


def score_options(
    topk: int | None,
    init_blocks: int | None,
    local_blocks: int | None,
    order: Order | None,
    return_scores: bool,
) -> dict[str, OptionValue]:
    """Returns the query options of the scoring calls."""
    check_bool("return_scores", return_scores)
    return {
        "topk": _whole("topk", topk),
        "init_blocks": _whole("init_blocks", init_blocks),
        "local_blocks": _whole("local_blocks", local_blocks),
        "order": order,
        "scores": return_scores,
    }


def profile_options(
    cache_use: CacheUse, repeats: int, return_scores: bool, trace: bool
) -> dict[str, OptionValue]:
    """Returns the query options of a profile."""
    check_bool("return_scores", return_scores)
    check_bool("trace", trace)
    repeats = check_int("repeats", repeats)
    return {"cache": cache_use, "repeats": repeats, "scores": return_scores, "trace": trace}


def score(
    q: Array, sequences: Sequence[str], query_lens: Sequence[int] | None, options: Mapping[str, OptionValue]
) -> Call[ScoreReply]:
    """Score a ragged batch over sequences."""
    query = _array("q", q, _QUERY_DTYPES)
    if not isinstance(sequences, (list, tuple)):
        raise InvalidArgumentError(
            "sequences", repr(sequences)[:60], "must be a list or tuple of ids", "put a single id into a list"
        )
    for sequence in sequences:
        _path(sequence)
    lens = None if query_lens is None else _lens(query_lens)
    topk = options["topk"]
    return Call(
        method="POST",
        path="/v1/sequences/score",
        query=_query(**options),
        body=encode_sequences_call(SequencesCall(query, tuple(sequences), lens)),
        parse=lambda body: _scores(body, query, topk),
        accept=BINARY,
        repeatable=True,
    )


def score_case(case: Case, options: Mapping[str, OptionValue]) -> Call[ScoreReply]:
    """Score a case. Its expected results are not sent."""
    _check_case(case)
    topk = case.topk if options["topk"] is None else options["topk"]
    return Call(
        method="POST",
        path="/v1/score",
        query=_query(**options),
        body=case_buffers(_without_expectations(case)),
        parse=lambda body: _scores(body, case.index_q, topk),
        accept=BINARY,
        repeatable=True,
    )


def profile(case: Case, options: Mapping[str, OptionValue]) -> Call[Profile]:
    """Profile a case."""
    _check_case(case)
    return Call(
        method="POST",
        path="/v1/profile",
        query=_query(**options),
        body=case_buffers(_without_expectations(case)),
        parse=lambda body: record(Profile, body),
        repeatable=True,
    )


def _get(path: str, kind: type[T]) -> Call[T]:
    return Call(method="GET", path=path, parse=lambda body: record(kind, body), repeatable=True)


def _sequence(body: bytearray) -> SequenceInfo:
    return record(SequenceInfo, body)


def _scores(body: bytearray, query: Array, topk: OptionValue) -> ScoreReply:
    """Reads scores and checks that they are of the rows that were asked for."""
    try:
        reply = decode_reply(body)
    except CaseFileError as error:
        raise BadReplyError(f"the answer holds no scores: {error}") from error
    tokens, heads = query.shape[:2]
    got = reply.block_ids.shape
    if got[:2] != (heads, tokens) or (topk is not None and got[2] != topk):
        wanted = [heads, tokens, "k" if topk is None else topk]
        raise BadReplyError(f"block_ids.shape = {list(got)}: {wanted} was asked for; the answer is another's")
    return reply


def _check_case(case: object) -> None:
    if not isinstance(case, Case):
        limit = "must be a Case"
        raise InvalidArgumentError("case", type(case).__name__, limit, "read it: indexer.case.read_case")


def _without_expectations(case: Case) -> Case:
    return dataclasses.replace(case, expected_scores=None, expected_block_ids=None, engine=None)


def _array(name: str, value: object, dtypes: tuple[np.dtype[Any], ...]) -> Array:
    if not isinstance(value, np.ndarray):
        raise InvalidArgumentError(
            name, type(value).__name__, "must be a numpy array", "convert it (ml_dtypes has bfloat16)"
        )
    check_unmasked(name, value)
    if value.dtype not in dtypes:
        names = ", ".join(dtype.name for dtype in dtypes)
        raise InvalidArgumentError(
            f"{name}.dtype", value.dtype, f"must be one of {names}", "call .astype() with one of them"
        )
    return value


def _whole(name: str, value: object) -> int | None:
    return None if value is None else check_int(name, value)


def _lens(query_lens: object) -> tuple[int, ...]:
    """Returns query lengths that fit the 32-bit integers they travel as."""
    if not isinstance(query_lens, (list, tuple)) and not (
        isinstance(query_lens, np.ndarray) and query_lens.ndim == 1
    ):
        raise InvalidArgumentError(
            "query_lens", repr(query_lens)[:60], "must be a list, a tuple or a flat array", "call .tolist()"
        )
    check_unmasked("query_lens", query_lens)
    lens = tuple(check_int(f"query_lens[{row}]", value) for row, value in enumerate(query_lens))
    for row, value in enumerate(lens):
        if not 0 <= value <= MAX_SEQ_LEN:
            raise InvalidArgumentError(
                f"query_lens[{row}]", value, f"must be 0 to {MAX_SEQ_LEN}", "pass each sequence's queries"
            )
    return lens


def _path(sequence: object) -> str:
    if not (
        isinstance(sequence, str)
        and sequence.isascii()
        and sequence.isalnum()
        and len(sequence) <= _MAX_ID_CHARS
    ):
        raise InvalidArgumentError(
            "sequence", repr(sequence)[:60], "must be an id of the server", "use what add_sequence() returned"
        )
    return f"/v1/sequences/{quote(sequence)}"


def _query(**options: OptionValue) -> dict[str, str]:
    """Returns the options that were given as query parameters."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
