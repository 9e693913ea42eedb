"""The scorer: a paged cache of index keys and a backend that scores against it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.cache import PagedKeyCache
from indexer.config import IndexerConfig
from indexer.pipeline import (
    TOO_MANY_QUERIES,
    ScoreOptions,
    ScoreResult,
    StageTimes,
    named_out_of_memory,
    score_and_select,
)
from kernel.arguments import as_int, check_bool
from kernel.backends import registry
from kernel.backends.base import Order
from kernel.batch import Request, ScoreBatch
from kernel.checks import (
    check_apart,
    check_finite,
    check_forced_blocks,
    check_order,
    check_scores_buffer,
    check_tensor,
    check_topk,
    checked_requests,
)
from kernel.contract import HEAD_DIM, MAX_SEQ_BLOCKS
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import build_lut, quantize_query
from kernel.page import as_pages

KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_QUERY_DTYPES = (*KEY_DTYPES, torch.float8_e4m3fn)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def untraced(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a method run as it is written where torch.compile traces its caller: the graph breaks there.

    A compiler may add and multiply in another order, which changes bits, and it cannot trace reads of numbers
    on the host, nor tables of complex pairs.
    """

    @functools.wraps(method)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            # Not as a decorator: that imports the compiler, seconds for all who compile nothing.
            plain: Callable[_Arguments, _Result] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return plain(*args, **kwargs)
        return method(*args, **kwargs)

    return run


class IndexScorer:
    """Scores blocks of index keys for index queries and selects the best of every row.

    Calls may come from several threads and run one after another. A call that raises leaves the scorer as it
    was before.

    Args:
        config: geometry and defaults.

    Raises:
        InvalidArgumentError: the device has no room for the pages, or the backend cannot use it.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(self, config: IndexerConfig) -> None:
        if not isinstance(config, IndexerConfig):
            raise InvalidArgumentError(
                "config",
                type(config).__name__,
                "must be an IndexerConfig",
                "pass IndexerConfig(num_index_heads=..., num_pages=...)",
            )
        self.config = config
        self._backend = registry.create(config.backend, config.device, config.precision, config.scale_choice)
        self._cache = PagedKeyCache(config.num_pages, self._backend)
        self._lut = build_lut(self.device)
        self._lock = threading.RLock()

    @property
    def backend(self) -> str:
        """Name of the backend that runs."""
        return self._backend.name

    @property
    def device(self) -> torch.device:
        """Where the cache lives, and every tensor given or returned."""
        return self._cache.pages.device

    @property
    def pages(self) -> torch.Tensor:
        """The cache itself, ``[num_pages, 9216]`` uint8. Not a copy: read it, do not write it."""
        return self._cache.pages

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self._cache.allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._cache.allocator.num_free

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the live sequences, oldest first."""
        return self._cache.sequences

    def sequence_length(self, seq: int) -> int:
        """Tokens of a sequence.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        return self._cache.length(seq)

    def block_table(self, seq: int) -> torch.Tensor:
        """The page id of each block of a sequence, ``[blocks]`` int32 on the host.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        return torch.tensor(self._cache.block_table(seq), dtype=torch.int32, device="cpu")

    @untraced
    def add_sequence(self) -> int:
        """Make an empty sequence and return its id. Ids are never used twice."""
        with self._lock:
            return self._cache.add()

    @untraced
    def append_keys(self, seq: int, k: torch.Tensor) -> None:
        """Quantise index keys to NVFP4 and append them to a sequence, allocating pages as needed.

        Args:
            seq: a live sequence.
            k: ``[n, 128]`` bfloat16, float16 or float32, finite, on the scorer's device. ``n`` may be 0.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: ``k`` is not such a tensor, makes the sequence too long, or needs memory
                that is not there.
            OutOfPagesError: too few free pages; says how many are missing.
        """
        limit = "inserting them needs more memory than there is"
        with self._lock, named_out_of_memory("k.shape[0]", k, limit, "append fewer keys at a time"):
            check_tensor("k", k, dtypes=KEY_DTYPES, shape=(None, HEAD_DIM), device=self.device)
            self._cache.append(seq, k)

    @untraced
    def fork_sequence(self, seq: int) -> int:
        """Make a sequence with the same keys and return its id. It shares every page; the partial last one is
        copied when either side appends to it.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        with self._lock:
            return self._cache.fork(seq)

    @untraced
    def free_sequence(self, seq: int) -> None:
        """Drop a sequence. Pages that no other sequence holds are zeroed and can be allocated again.

        It is dropped too when that raises.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        with self._lock:
            self._cache.free(seq)

    @untraced
    def score(
        self,
        q: torch.Tensor,
        sequences: Sequence[int],
        query_lens: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        *,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> ScoreResult:
        """Score the last positions of sequences against their own keys and select each row's best blocks.

        Args:
            q: ``[total_q, H, 128]`` float8_e4m3fn, or bfloat16, float16, float32 (cast to it, saturating),
                finite, on the scorer's device; the rows of the sequences one after another.
            sequences: live sequences; one may be named several times.
            query_lens: queries of each sequence: they stand at its last positions. None: every row belongs to
                the only sequence, or each of several sequences has one.
            return_scores: whether to keep the scores; without them the memory of every backend but
                ``reference`` does not grow with the context.
            topk: blocks to select, 1 to ``MAX_TOPK`` (64); as configured when None. Likewise the next three.
            init_blocks: blocks forced at a row's start.
            local_blocks: blocks forced at a row's end.
            order: ``score`` (descending) or ``block`` (ascending).

        Raises:
            UnknownSequenceError: one of them is not live.
            InvalidArgumentError: an argument is outside the contract, or the call does not fit in memory.
        """
        with self._lock, named_out_of_memory("q.shape[0]", q, *TOO_MANY_QUERIES):
            pages = self._cache.pages
            times = StageTimes(pages.device)
            with times.stage("check"):
                options = self._options(return_scores, topk, init_blocks, local_blocks, order)
                requests = self._requests(q, sequences, query_lens)
                block_table = self._cache.block_tables(sequences)
            q = self._quantized(q, times)
            forced = options.init_blocks, options.local_blocks
            batch = ScoreBatch(q, pages, block_table, self._lut, requests, *forced)
            return score_and_select(self._backend, batch, options, times)

    @untraced
    def score_paged(
        self,
        q: torch.Tensor,
        pages: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scores: torch.Tensor | None = None,
        return_scores: bool = True,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> ScoreResult:
        """Score against a cache that the caller owns. Reads and writes nothing of the scorer's own.

        Args:
            q: as in :meth:`score`.
            pages: ``[num_pages, 9216]`` uint8 or as :func:`kernel.page.as_pages` takes it; may be strided.
            block_table: ``[batch, max_blocks]`` int32; columns past a request's blocks may hold anything.
            cu_seqlens_q: ``[batch + 1]`` int32, exclusive prefix sum of the query lengths.
            seq_lens: ``[batch]`` int32, keys of each request, this step's tokens included.
            scores: ``[H, total_q, S]`` float32 to write the scores to, ``S`` at least the blocks of the
                longest request; its cells are unspecified after a call that raised.
            return_scores: as in :meth:`score`, and so are the rest. Not False together with ``scores``.
            topk: blocks to select.
            init_blocks: blocks forced at a row's start.
            local_blocks: blocks forced at a row's end.
            order: order of the block ids.

        Raises:
            InvalidArgumentError: an argument is outside the contract, or the call does not fit in memory.
        """
        with self._lock, named_out_of_memory("q.shape[0]", q, *TOO_MANY_QUERIES):
            device = self.device
            times = StageTimes(device)
            with times.stage("check"):
                options = self._options(return_scores, topk, init_blocks, local_blocks, order)
                self._check_query(q)
                check_tensor("pages", pages, dtypes=(torch.uint8,), shape=None, device=device)
                pages = as_pages(pages)
                requests = checked_requests(q.shape[0], pages, block_table, cu_seqlens_q, seq_lens)
                check_finite("q", q)
                given_q = q
            q = self._quantized(q, times)
            forced = options.init_blocks, options.local_blocks
            batch = ScoreBatch(q, pages, block_table.contiguous(), self._lut, requests, *forced)
            if scores is not None:
                with times.stage("check"):
                    if not return_scores:
                        raise InvalidArgumentError(
                            "return_scores",
                            False,
                            "scores was given to write them to",
                            "leave one of the two out",
                        )
                    check_scores_buffer(scores, batch)
                    check_apart("scores", scores, {"q": given_q})
                    scores = scores.detach()
            return score_and_select(self._backend, batch, options, times, scores)

    def _options(
        self,
        return_scores: bool,
        topk: int | None,
        init_blocks: int | None,
        local_blocks: int | None,
        order: Order | None,
    ) -> ScoreOptions:
        """Checks the options of a call; those of the configuration, checked before, stand in for None."""
        check_bool("return_scores", return_scores)
        config = self.config
        init = config.init_blocks if init_blocks is None else check_forced_blocks("init_blocks", init_blocks)
        local = (
            config.local_blocks if local_blocks is None else check_forced_blocks("local_blocks", local_blocks)
        )
        if order is not None:
            check_order(order)
        return ScoreOptions(
            topk=config.topk_blocks if topk is None else check_topk("topk", topk),
            order=config.order if order is None else order,
            # More than a context holds is all of it; a kernel's integers end sooner than Python's.
            init_blocks=min(init, MAX_SEQ_BLOCKS),
            local_blocks=min(local, MAX_SEQ_BLOCKS),
            return_scores=return_scores,
        )

    def _requests(
        self,
        q: torch.Tensor,
        sequences: Sequence[int],
        query_lens: Sequence[int] | NDArray[np.integer[Any]] | None,
    ) -> tuple[Request, ...]:
        """Checks the queries and the sequences of a call: the rows of each of them."""
        if not isinstance(sequences, (list, tuple)):
            raise InvalidArgumentError(
                "sequences",
                type(sequences).__name__,
                "must be a list or a tuple of ids",
                "pass [sequence], or call .tolist()",
            )
        seq_lens = [self.sequence_length(seq) for seq in sequences]
        self._check_query(q)
        requests = ragged_requests(q.shape[0], seq_lens, query_lens)
        check_finite("q", q)  # last: only now is their number known to be one whose memory may be read
        return requests

    def _check_query(self, q: torch.Tensor) -> None:
        shape = (None, self.config.num_index_heads, HEAD_DIM)
        check_tensor("q", q, dtypes=_QUERY_DTYPES, shape=shape, device=self.device)

    def _quantized(self, q: torch.Tensor, times: StageTimes) -> torch.Tensor:
        if q.dtype == torch.float8_e4m3fn:
            return q.detach().contiguous()
        with times.stage("quantize_query"):
            return quantize_query(q.detach()).contiguous()


# ---- Rows of ``q`` and the sequences they belong to ----


def ragged_requests(
    total_q: int, seq_lens: Sequence[int], query_lens: Sequence[int] | NDArray[np.integer[Any]] | None
) -> tuple[Request, ...]:
    """Lay the rows of ``q`` out over the sequences of a call: each sequence's rows are its last positions.

    Args:
        total_q: rows of ``q``.
        seq_lens: tokens of each sequence of the call.
        query_lens: queries of each sequence. None: all rows belong to the only sequence, or each of several
            sequences has one row.

    Raises:
        InvalidArgumentError: the lengths do not fit each other.
    """
    if query_lens is None:
        lens = _implied_lens(total_q, len(seq_lens))
    else:
        lens = _checked_lens(query_lens, total_q, len(seq_lens))
    requests = []
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(lens, seq_lens)):
        if query_len > seq_len:
            raise InvalidArgumentError(
                f"query_lens[{row}]",
                query_len,
                f"must be at most the {seq_len} tokens of its sequence",
                "append this step's keys before scoring its queries",
            )
        requests.append(Request(row, start, query_len, seq_len))
        start += query_len
    return tuple(requests)


def _implied_lens(total_q: int, num_sequences: int) -> list[int]:
    if num_sequences == 1:
        return [total_q]
    if total_q == num_sequences:
        return [1] * num_sequences
    raise InvalidArgumentError(
        "query_lens",
        None,
        f"must be given: {total_q} rows of q do not say how many belong to each of {num_sequences} sequences",
        "pass the number of queries of each sequence",
    )


def _checked_lens(
    query_lens: Sequence[int] | NDArray[np.integer[Any]], total_q: int, num_sequences: int
) -> list[int]:
    if not isinstance(query_lens, (list, tuple)) and not (
        isinstance(query_lens, np.ndarray) and query_lens.ndim == 1
    ):
        raise InvalidArgumentError(
            "query_lens",
            type(query_lens).__name__,
            "must be a list, a tuple or a flat array of ints",
            "call .tolist()",
        )
    lens: list[int] = []
    for row, query_len in enumerate(query_lens):
        number = as_int(query_len)
        if number is None or number < 0:
            raise InvalidArgumentError(
                f"query_lens[{row}]", repr(query_len), "must be an int, 0 or more", "pass whole numbers"
            )
        lens.append(number)
    if len(lens) != num_sequences:
        raise InvalidArgumentError(
            "query_lens", lens, f"must hold {num_sequences} lengths", "pass one for each sequence"
        )
    if sum(lens) != total_q:
        raise InvalidArgumentError(
            "query_lens", lens, f"must add up to q.shape[0] = {total_q}", "lay q out in their order"
        )
    return lens
