"""The scorer: a paged cache of index keys and a backend that scores against it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

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
from indexer.plan import (
    HostInts,
    IndexPlan,
    check_workspace,
    device_lengths,
    host_lengths,
    integers,
)
from kernel import operators
from kernel.arguments import as_int, check_bool, check_int, check_unmasked
from kernel.backends import registry
from kernel.backends.base import Backend, Order
from kernel.checks import (
    as_pages,
    check_cells,
    check_device,
    check_finite,
    check_forced_blocks,
    check_not_transformed,
    check_order,
    check_ragged_tensors,
    check_scores_buffer,
    check_table_width,
    check_tensor,
    check_topk,
    check_writable,
    checked_requests,
)
from kernel.contract import HEAD_DIM, MAX_SEQ_BLOCKS, MAX_SEQ_LEN
from kernel.errors import InvalidArgumentError, ReentrantCallError
from kernel.nvfp4 import build_lut, quantize_query
from kernel.page import blocks_of
from kernel.step import DeviceLengths, Lengths, Plan, Step
from kernel.threads import on_one_thread

KEY_DTYPES = operators.FLOAT_DTYPES
_KEPT_PLANS = 4
"""Calls of other lengths or options whose plans are kept."""
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
    was before. Within a call, a signal handler, a finaliser or another callback of its thread may read the
    properties, lengths and block tables; any other call from there raises :class:`ReentrantCallError`.

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
        self._spec = operators.spec(self._backend.name, config.precision, config.scale_choice)
        operators.backend_of(self._spec, self._backend.device)  # made now: that waits for the device
        self._lut = build_lut(self.device)
        self._lock = threading.RLock()
        self._plans: dict[tuple[object, ...], Plan] = {}

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
        with self._turn():
            return self._cache.add()

    @untraced
    def append_keys(
        self, seq: int | Sequence[int], k: torch.Tensor, lens: Sequence[int] | None = None
    ) -> None:
        """Quantise index keys to NVFP4 and append them, allocating pages as needed.

        Args:
            seq: a live sequence, or a list of several, each once: then all of them get their keys, by one
                launch, or none does.
            k: ``[n, 128]`` bfloat16, float16 or float32, finite, on the scorer's device. ``n`` may be 0.
            lens: keys of each of several sequences, in their order; one each when None.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: ``k`` is not such a tensor, makes a sequence too long, or needs memory that
                is not there; the lengths do not add up to ``n``.
            OutOfPagesError: too few free pages; says how many are missing.
        """
        limit = "inserting them needs more memory than there is"
        with self._turn(), named_out_of_memory("k.shape[0]", k, limit, "append fewer keys at a time"):
            check_tensor("k", k, dtypes=KEY_DTYPES, shape=(None, HEAD_DIM), device=self.device)
            seqs = list(seq) if isinstance(seq, (list, tuple)) else [cast("int", seq)]
            for one in seqs:
                self.sequence_length(one)  # live, which the following relies on
            self._cache.append(seqs, append_lens(seqs, lens, k.shape[0]), k)

    @untraced
    def truncate_sequence(self, seq: int, length: int) -> None:
        """Drop the last keys of a sequence, those of rejected drafts for one. Pages that no sequence holds
        any more are zeroed and become free. The keys are dropped too when the device fails at that.

        Args:
            seq: a live sequence.
            length: tokens to keep, 0 to those it has.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: ``length`` is no such number.
            OutOfPagesError: the new last page is shared with a fork and there is no free page for a copy.
        """
        with self._turn():
            length = check_truncation(seq, length, self.sequence_length(seq))
            with self._cache.truncating(seq, length):
                pass

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise keys to NVFP4 and scatter them into pages that the caller owns.

        Waits for nothing: values are not checked, keys must be finite. May be captured and compiled.

        Args:
            keys: ``[n, 128]`` bfloat16, float16 or float32, on the scorer's device.
            pages: ``[num_pages, 9216]`` uint8, any page stride, written in place.
            slots: ``[n]`` int64, ``page_id * 128 + token``, distinct; a negative one, and on a GPU one past
                the pages, is skipped.

        Raises:
            InvalidArgumentError: a wrong shape, dtype, stride or device.
        """
        check_device("pages", pages, self.device)
        try:
            torch.ops.nvfp4_indexer.insert(keys, pages, slots, self._spec)
        except InvalidArgumentError:
            raise
        except Exception:
            operators.refuse_undispatched({"keys": keys, "pages": pages, "slots": slots}, "pages")
            raise

    @untraced
    def block_tables(self, sequences: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """The block tables of some sequences on the device, as :meth:`plan` takes them.

        Args:
            sequences: live sequences.
            out: ``[batch, max_blocks]`` int32 to write to, a captured graph's for one; at least as many rows
                and blocks. Every column of the sequences' rows is written; rows past them are left alone.

        Returns:
            ``[len(sequences), blocks of the longest]`` int32, or ``out``; -1 past a sequence's blocks.

        Raises:
            UnknownSequenceError: one of them is not live.
            InvalidArgumentError: ``out`` is too small or no such tensor.
        """
        with self._turn():
            if out is None:
                return self._cache.block_tables(_listed(sequences)).clone()
            check_tensor("out", out, dtypes=(torch.int32,), shape=(None, None), device=self.device)
            check_cells("out", out)
            check_writable("out", out)
            blocks = max((blocks_of(self.sequence_length(seq)) for seq in _listed(sequences)), default=0)
            if out.shape[0] < len(sequences) or out.shape[1] < blocks:
                raise InvalidArgumentError(
                    "out.shape",
                    tuple(out.shape),
                    f"must be at least [{len(sequences)}, {blocks}]",
                    "pass a larger buffer",
                )
            table = self._cache.block_tables(sequences, min(out.shape[1], self.num_pages))
            out[: len(sequences), : table.shape[1]].copy_(table)
            out[: len(sequences), table.shape[1] :].fill_(-1)
            return out

    @untraced
    def plan(
        self,
        block_table: torch.Tensor | None = None,
        *,
        sequences: Sequence[int] | None = None,
        query_lens: HostInts | None = None,
        seq_lens: HostInts | torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        total_q: int | None = None,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order | None = None,
    ) -> IndexPlan:
        """Plan a step: everything that is the same for all layers of a model. Run it with
        :meth:`IndexPlan.select` once a layer.

        Three forms. Lengths on the host, any mix of prefill and decode::

            plan(block_table, query_lens=[5, 1], seq_lens=[4000, 900])

        The scorer's own sequences::

            plan(sequences=[a, b], query_lens=[5, 1])

        Lengths that only the device knows, and may change until each run: decode, for a captured graph::

            plan(block_table, cu_seqlens_q=cu, seq_lens=lens, max_query_len=4, max_seq_len=131072)

        Args:
            block_table: ``[batch, max_blocks]`` int32 on the scorer's device; columns past a request's blocks
                may hold anything. Kept, not copied. Page ids are not read: ids outside the cache are read as
                the nearest inside.
            sequences: live sequences of the scorer, in place of a block table and ``seq_lens``.
            query_lens: queries of each request, on the host: they stand at its last positions.
            seq_lens: keys of each request, this step's included: numbers on the host with ``query_lens``,
                ``[batch]`` int32 on the device with ``cu_seqlens_q``.
            cu_seqlens_q: ``[batch + 1]`` int32 on the device, exclusive prefix sum of the query lengths. A
                request without queries pads the batch.
            max_query_len: with ``cu_seqlens_q``: most queries of a request; times H at most 64, on flydsl
                16. Rows past it are selected no block.
            max_seq_len: with ``cu_seqlens_q``: most keys of a request; a longer one is read as if it ended
                with the block that this many keys end in.
            total_q: with ``cu_seqlens_q``: rows of ``q``; ``batch * max_query_len`` when None. Scores of so
                many rows on ``max_seq_len`` keys, the workspace of a run, may take 1 GiB.
            topk: blocks to select, 1 to ``MAX_TOPK`` (64); as configured when None. Likewise the next three.
            init_blocks: blocks forced at a row's start.
            local_blocks: blocks forced at a row's end.
            order: ``score`` (descending) or ``block`` (ascending).

        Raises:
            UnknownSequenceError: one of the sequences is not live.
            InvalidArgumentError: an argument is outside the contract, missing or of another form.
        """
        with self._turn():
            options = self._options(False, topk, init_blocks, local_blocks, order)
            heads = self.config.num_index_heads
            if sequences is not None:
                _refuse(
                    "sequences",
                    block_table=block_table,
                    seq_lens=seq_lens,
                    cu_seqlens_q=cu_seqlens_q,
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    total_q=total_q,
                )
                keys = [self.sequence_length(seq) for seq in _listed(sequences)]
                queries = [1] * len(keys) if query_lens is None else query_lens
                lengths: Lengths | DeviceLengths = host_lengths(queries, keys, len(keys))
                table = self._cache.block_tables(sequences)
            else:
                if block_table is None or seq_lens is None:
                    missing = "block_table" if block_table is None else "seq_lens"
                    raise InvalidArgumentError(
                        missing, None, "must be given", "or pass sequences of the scorer's own"
                    )
                check_tensor(
                    "block_table", block_table, dtypes=(torch.int32,), shape=(None, None), device=self.device
                )
                table = block_table
                if cu_seqlens_q is not None:
                    _refuse("cu_seqlens_q", query_lens=query_lens)
                    lens = cast("torch.Tensor", seq_lens)
                    lengths = device_lengths(
                        cu_seqlens_q,
                        lens,
                        max_query_len,
                        max_seq_len,
                        block_table,
                        heads,
                        self._backend.max_device_rows,
                    )
                elif query_lens is None:
                    raise InvalidArgumentError(
                        "query_lens",
                        None,
                        "must be given, or cu_seqlens_q",
                        "pass the queries of each request",
                    )
                else:
                    _refuse(
                        "query_lens", max_query_len=max_query_len, max_seq_len=max_seq_len, total_q=total_q
                    )
                    lengths = host_lengths(query_lens, cast("HostInts", seq_lens), block_table.shape[0])
                    check_table_width(block_table, lengths)
            if isinstance(lengths, DeviceLengths):
                rows = lengths.seq_lens.shape[0] * lengths.max_query_len
                rows = rows if total_q is None else check_int("total_q", total_q)
                if rows < 0:
                    raise InvalidArgumentError("total_q", rows, "must be 0 or more", "pass the rows of q")
                check_workspace(rows, heads, lengths)
                if not table.is_contiguous():
                    raise InvalidArgumentError(
                        "block_table.stride()",
                        table.stride(),
                        "must be contiguous",
                        "pass a buffer of its own",
                    )
            else:
                rows = int(lengths.query_lens.sum())
            step = self._step(table.contiguous(), rows, lengths, options)
            return IndexPlan(
                plan=self._backend.plan(step),
                pages=self._cache.pages,
                backend=self._spec,
                num_heads=heads,
                total_q=rows,
                topk=options.topk,
                num_score_blocks=step.num_score_blocks,
            )

    def _step(
        self, block_table: torch.Tensor, total_q: int, lengths: Lengths | DeviceLengths, options: ScoreOptions
    ) -> Step:
        return Step(
            block_table,
            total_q,
            self.config.num_index_heads,
            lengths,
            options.init_blocks,
            options.local_blocks,
            options.order == "block",
        )

    def _planned(
        self, block_table: torch.Tensor, total_q: int, lengths: Lengths, options: ScoreOptions
    ) -> Plan:
        """The plan of a call. The layers of a step repeat its lengths, so the last plans are kept."""
        key = (
            *[field.tobytes() for field in lengths.fields],
            block_table.shape,
            total_q,
            *(options.init_blocks, options.local_blocks, options.order),
            # The copy of a plan's tensors to the device is queued on a stream.
            torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0,
        )
        plan = self._plans.pop(key, None)
        if plan is None:
            made = self._backend.plan(self._step(block_table, total_q, lengths, options))
            plan = made.on(made.tensors[1])  # does not keep the caller's table
        self._plans[key] = plan
        if len(self._plans) > _KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan.on(block_table)

    @untraced
    def fork_sequence(self, seq: int) -> int:
        """Make a sequence with the same keys and return its id. It shares every page; the partial last one is
        copied when either side appends to it.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        with self._turn():
            return self._cache.fork(seq)

    @untraced
    def free_sequence(self, seq: int) -> None:
        """Drop a sequence. Pages that no other sequence holds are zeroed and can be allocated again.

        It is dropped too when that raises.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        with self._turn():
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
        timings: bool = False,
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
            timings: whether to measure the stages of the call.

        Raises:
            UnknownSequenceError: one of them is not live.
            InvalidArgumentError: an argument is outside the contract, or the call does not fit in memory.
        """
        with self._turn(), named_out_of_memory("q.shape[0]", q, *TOO_MANY_QUERIES):
            times = StageTimes(self.device, measured=timings)
            with times.stage("check"):
                options = self._options(return_scores, topk, init_blocks, local_blocks, order)
                lengths = self._lengths(q, sequences, query_lens)
                block_table = self._cache.block_tables(sequences)
                plan = self._planned(block_table, q.shape[0], lengths, options)
            q = self._quantized(q, times)
            return score_and_select(self._backend, plan, q, self._cache.pages, options, times)

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
        timings: bool = False,
    ) -> ScoreResult:
        """Score against a cache that the caller owns. Reads and writes nothing of the scorer's own.

        Args:
            q: as in :meth:`score`.
            pages: ``[num_pages, 9216]`` uint8 or as :func:`kernel.checks.as_pages` takes it; may be strided.
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
            timings: whether to measure the stages of the call.

        Raises:
            InvalidArgumentError: an argument is outside the contract, or the call does not fit in memory.
        """
        with self._turn(), named_out_of_memory("q.shape[0]", q, *TOO_MANY_QUERIES):
            device = self.device
            times = StageTimes(device, measured=timings)
            with times.stage("check"):
                options = self._options(return_scores, topk, init_blocks, local_blocks, order)
                self._check_query(q)
                pages = as_pages(pages, device)
                lengths = paged_lengths(self._backend, q, pages, block_table, cu_seqlens_q, seq_lens)
                given_q, block_table = q, block_table.contiguous()
                plan = self._planned(block_table, q.shape[0], lengths, options)
            q = self._quantized(q, times)
            if scores is not None:
                with times.stage("check"):
                    if not return_scores:
                        raise InvalidArgumentError(
                            "return_scores",
                            False,
                            "scores was given to write them to",
                            "leave one of the two out",
                        )
                    read = {"q": given_q, "pages": pages, "block_table": block_table}
                    check_scores_buffer(scores, q, lengths.max_blocks, read)
                    scores = scores.detach()
            return score_and_select(self._backend, plan, q, pages, options, times, scores)

    def _turn(self) -> AbstractContextManager[object]:
        """The lock that a call holds. A thread takes it once: a call that a signal handler, a finaliser or a
        callback makes inside of another would find a state in between, and change it.

        Raises:
            ReentrantCallError: a call of this thread holds it.
            InvalidArgumentError: a transform of torch.func is active; what torch makes then has no memory.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise ReentrantCallError
        check_not_transformed("a scorer")
        return self._lock

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

    def _lengths(
        self,
        q: torch.Tensor,
        sequences: Sequence[int],
        query_lens: HostInts | None,
    ) -> Lengths:
        """Checks the queries and the sequences of a call: the rows of each of them."""
        seq_lens = [self.sequence_length(seq) for seq in _listed(sequences)]
        self._check_query(q)
        lengths = ragged_lengths(q.shape[0], seq_lens, query_lens)
        check_finite("q", q)  # last: only now is their number known to be one whose memory may be read
        return lengths

    def _check_query(self, q: torch.Tensor) -> None:
        shape = (None, self.config.num_index_heads, HEAD_DIM)
        check_tensor("q", q, dtypes=_QUERY_DTYPES, shape=shape, device=self.device)

    def _quantized(self, q: torch.Tensor, times: StageTimes) -> torch.Tensor:
        if q.dtype == torch.float8_e4m3fn:
            return q.detach().contiguous()
        with times.stage("quantize_query"), on_one_thread() if q.is_cpu else nullcontext():
            return quantize_query(q.detach()).contiguous()


def _listed(sequences: Sequence[int]) -> Sequence[int]:
    if not isinstance(sequences, (list, tuple)):
        raise InvalidArgumentError(
            "sequences",
            type(sequences).__name__,
            "must be a list or a tuple of ids",
            "pass [sequence], or call .tolist()",
        )
    return sequences


def _refuse(other: str, **arguments: object) -> None:
    """Refuse arguments that belong to another form of a plan."""
    for name, value in arguments.items():
        if value is not None:
            raise InvalidArgumentError(
                name, type(value).__name__, f"does not go with {other}", "pass the arguments of one form"
            )


def check_truncation(seq: int, length: int, tokens: int) -> int:
    """Refuse to truncate a sequence to more tokens than it has."""
    length = check_int("length", length)
    if not 0 <= length <= tokens:
        raise InvalidArgumentError(
            "length",
            length,
            f"must be 0 to {tokens}, the tokens of sequence {seq}",
            "append keys to make it longer",
        )
    return length


def append_lens(seqs: Sequence[int], lens: Sequence[int] | None, num_keys: int) -> list[int]:
    """Checks the sequences of an append: the number of keys of each."""
    if len(set(seqs)) != len(seqs):
        raise InvalidArgumentError("seq", seqs, "names a sequence twice", "append all its keys at once")
    if lens is None:
        added = [num_keys] if len(seqs) == 1 else [1] * len(seqs)
    else:
        added = integers("lens", lens).tolist()
    if len(added) != len(seqs) or min(added, default=0) < 0:
        raise InvalidArgumentError(
            "lens", added, f"must be {len(seqs)} numbers, 0 or more", "pass the keys of each sequence"
        )
    if sum(added) != num_keys:
        raise InvalidArgumentError(
            "lens", added, f"must add up to k.shape[0] = {num_keys}", "lay k out in the sequences' order"
        )
    return added


# ---- Rows of ``q`` and the sequences they belong to ----


def paged_lengths(
    backend: Backend,
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Lengths:
    """Checks the values of a paged call, all of them with one wait for the device.

    Args:
        backend: runs the checks.
        q: ``[total_q, H, 128]``, checked but for its values.
        pages: ``[num_pages, 9216]`` uint8, checked.
        block_table: ``[batch, max_blocks]`` int32.
        cu_seqlens_q: ``[batch + 1]`` int32.
        seq_lens: ``[batch]`` int32.

    Raises:
        InvalidArgumentError: naming the argument, its value, the limit and the remedy.
    """
    check_ragged_tensors(block_table, cu_seqlens_q, seq_lens, pages.device)
    batch = block_table.shape[0]
    if q.shape[0] > batch * MAX_SEQ_LEN:
        # More rows than any lengths can have: not to be read, they may be an expanded view.
        checked_requests(q.shape[0], pages, block_table, cu_seqlens_q, seq_lens)
    on_device = backend.call_values(q.detach(), block_table, cu_seqlens_q, seq_lens, pages.shape[0])
    values = on_device.cpu().numpy().astype(np.int64)
    offsets, keys, wrong = values[: batch + 1], values[batch + 1 : -2], values[-2:]
    lengths = Lengths.consecutive(np.diff(offsets), keys)
    if (
        wrong.any()
        or offsets[0] != 0
        or offsets[-1] != q.shape[0]
        or (lengths.query_lens < 0).any()
        or (lengths.prefix_lens < 0).any()
        or (keys > MAX_SEQ_LEN).any()
        or lengths.max_blocks > block_table.shape[1]
    ):
        # Something is wrong: find out what, one argument after another.
        checked_requests(q.shape[0], pages, block_table, cu_seqlens_q, seq_lens)
        check_finite("q", q)
    return lengths


def ragged_lengths(total_q: int, seq_lens: Sequence[int], query_lens: HostInts | None) -> Lengths:
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
    lengths = Lengths.consecutive(np.array(lens, dtype=np.int64), np.array(seq_lens, dtype=np.int64))
    missing = np.flatnonzero(lengths.prefix_lens < 0)
    if missing.size:
        row = int(missing[0])
        raise InvalidArgumentError(
            f"query_lens[{row}]",
            lens[row],
            f"must be at most the {seq_lens[row]} tokens of its sequence",
            "append this step's keys before scoring its queries",
        )
    return lengths


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
    check_unmasked("query_lens", query_lens)
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
