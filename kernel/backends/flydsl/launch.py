"""Launching the kernels from the host: arguments from tensors, grids, the chunks of a large launch.

A kernel and its host launcher are two files because a process with a kernel library has no FlyDSL, which the
kernels' files (``prefill.py``, ``decode.py``, ``topk.py``, ``insert.py``) import at the top. What both sides
share is in ``geometry.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.base import Order
from kernel.backends.flydsl import geometry, kernel_library, toolchain
from kernel.backends.flydsl.geometry import (
    DEFAULT_LAYOUT,
    KEYS_PER_WORKGROUP,
    LOAD_BYTES,
    MAX_BLOCKS,
    MAX_ROWS,
    OPERAND_BYTES,
    WAVES,
    WAVES_PER_SIMD,
    DecodeArguments,
    InsertArguments,
    KeyType,
    Launch,
    Layout,
    PrefillArguments,
    TopkArguments,
    Variant,
    variant_for,
)
from kernel.backends.flydsl.kernel_library import LibraryKernels
from kernel.backends.flydsl.runtime import (
    Device,
    launching,
    preflight,
    refuse_first_launch_in_capture,
)
from kernel.batch import ScoreBatch
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_BLOCKS
from kernel.errors import InvalidArgumentError
from kernel.plan import (
    MAXIMA_BLOCKS,
    MOST_SCORE_BLOCKS,
    STORE_BLOCKS,
    WORK_ITEM_DWORDS,
    PlanCache,
    launches,
)
from kernel.step import Lengths

# ---- Kernels: the library's, else compiled at their first launch ----

Key = TypeVar("Key", bound=Hashable)
_Key = TypeVar("_Key", bound=Hashable, contravariant=True)


class Kernels(Protocol[_Key]):
    """Kernels of a launcher on one device, by key; may be used from several threads."""

    def launch(self, key: _Key, tensors: Iterable[torch.Tensor], *arguments: int) -> None:
        """Launch; asynchronous on a GPU.

        Args:
            key: which kernel.
            tensors: every tensor whose address the launch is given.
            arguments: the launch's, without the stream.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            CompileError: the compiler refused the kernel.
            DeviceUnavailableError: the kernel is not there and may not be compiled here.
        """
        ...


def kernels_on(device: Device, name_of: Callable[[Key], str], build: Callable[[Key], Launch]) -> Kernels[Key]:
    """The kernels of a launcher on a device.

    Args:
        device: where launches go.
        name_of: a kernel's symbol by its key.
        build: FlyDSL's launcher of a kernel by its key; called, and FlyDSL imported, only to compile.

    Raises:
        DeviceUnavailableError: something that launching or compiling needs is missing, or the kernel library
            is unfit.
    """
    path = kernel_library.chosen()
    if path is None:
        return CompiledKernels(device, name_of, build)
    return LibraryKernels(device, kernel_library.load(path, device), name_of)


_COMPILED: dict[tuple[type, torch.device], dict[str, Launch]] = {}
"""Compiled kernels of this process by device and name: even from FlyDSL's cache one is traced anew."""
_compiling = threading.RLock()


class CompiledKernels(Generic[Key]):
    """Kernels that FlyDSL compiles, or loads from its cache; see :class:`Kernels`.

    Each is bound to the GPU of its first launch, and shared by the launchers of that GPU.
    """

    def __init__(self, device: Device, name_of: Callable[[Key], str], build: Callable[[Key], Launch]) -> None:
        toolchain.prepare()
        toolchain.prepare_cache()
        preflight(device)
        self._device, self._name_of, self._build = device, name_of, build
        self._kernels = _COMPILED.setdefault((type(device), device.torch_device), {})

    def launch(self, key: Key, tensors: Iterable[torch.Tensor], *arguments: int) -> None:
        """Launch; compiles at the first launch."""
        import flydsl.expr as fx

        with launching(self._device, tensors) as stream:
            name = self._name_of(key)
            kernel = self._kernels.get(name)
            if kernel is None:
                with _compiling:
                    kernel = self._kernels.get(name)
                    if kernel is None:
                        refuse_first_launch_in_capture(self._device, name)
                        from kernel.backends.flydsl.jit import compiled

                        self._kernels[name] = compiled(self._build(key), name, *arguments, fx.Stream(stream))
                        return
            kernel(*arguments, fx.Stream(stream))


# ---- Runs that are made again ----

_MOVING = {"q", "pages", "table", "scores", "maxima", "num_blocks", "block_ids"}
"""Arguments that may be addresses in tensors that a run is given."""
_ALWAYS = {"q", "pages", "table", "scores", "block_ids"}
"""Those of them that are."""
_STAYING = {"lut", "table_rows", "query_starts", "query_ends", "seq_lens", "work"}
"""Arguments that are addresses in a plan's tensors and the backend's own."""


class Run:
    """The launches of a run: made at its first, made again on other tensors of the same shapes and strides.

    Computing a launch's arguments takes longer than the launch. May be repeated from several threads.

    Args:
        given: the tensors that differ from run to run, each of its own storage.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        self._moving = list(given)
        self._num_given = len(given)
        self._workspaces: list[Callable[[], torch.Tensor]] = []
        self._made: list[tuple[Kernels[Any], Any, list[torch.Tensor], Any, tuple[int, ...]]] = []
        self._launches: list[_Repeated] = []

    def workspace(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that each run makes for itself."""
        made = make()
        self._workspaces.append(make)
        self._moving.append(made)
        return made

    def launch(
        self, kernels: Kernels[Key], key: Key, tensors: list[torch.Tensor], arguments: Any, *grid: int
    ) -> None:
        """Launch, see :class:`Kernels`.

        Args:
            kernels: the launcher's.
            key: which of them.
            tensors: every tensor whose address the launch is given.
            arguments: of the kernel, a class of ``geometry.py``.
            grid: workgroups of each dimension.
        """
        kernels.launch(key, tensors, *arguments, *grid)
        self._made.append((kernels, key, tensors, arguments, grid))

    def finish(self) -> bool:
        """End the first run. Whether it can be repeated: no operand was copied, no two are parts of one."""
        storages = [tensor.untyped_storage().data_ptr() for tensor in self._moving]
        for kernels, key, tensors, arguments, grid in self._made:
            fixed = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in storages]
            places = []
            for at, (name, value) in enumerate(zip(arguments._fields, arguments)):
                number = self._holder(value) if name in _MOVING | _STAYING else None
                if name in (_ALWAYS if number is None else _STAYING):
                    return False
                if number is not None:
                    places.append((at, number, value - self._moving[number].data_ptr()))
            self._launches.append(_Repeated(kernels, key, fixed, [*arguments, *grid], places))
        self._moving, self._made = [], []
        return len(set(storages)) == len(storages)

    def _holder(self, address: int) -> int | None:
        """The tensor that moves in whose storage an address lies."""
        for number, tensor in enumerate(self._moving):
            storage = tensor.untyped_storage()
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return number
        return None

    def __call__(self, *given: torch.Tensor) -> None:
        """The same run of other tensors."""
        moving = [*given, *(make() for make in self._workspaces)]
        addresses = [tensor.data_ptr() for tensor in moving]
        for one in self._launches:
            arguments = one.arguments.copy()
            for at, number, offset in one.places:
                arguments[at] = addresses[number] + offset
            one.kernels.launch(one.key, moving + one.fixed, *arguments)


class _Repeated(NamedTuple):
    """A launch of a run.

    Attributes:
        kernels, key: what is launched.
        fixed: tensors that are the same in every run.
        arguments: the kernel's, then the workgroups of each dimension.
        places: arguments that move: which, in which tensor, bytes behind its first element.
    """

    kernels: Kernels[Any]
    key: Any
    fixed: list[torch.Tensor]
    arguments: list[int]
    places: list[tuple[int, int, int]]


_WORKGROUPS_PER_COMPUTE_UNIT = WAVES_PER_SIMD
"""A workgroup has a wave on each SIMD."""


class PrefillLauncher:
    """Scores requests of any number of query rows on one device.

    Keeps a compiled kernel for each number of heads, bound to the GPU of its first launch: one launcher
    serves one device. May be used from several threads.

    Args:
        device: where to launch.

    Raises:
        DeviceUnavailableError: something that launching or compiling needs is missing.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels = kernels_on(device, geometry.prefill_name, _build_prefill)
        self._plans = PlanCache()

    def work(
        self, lengths: Lengths, num_heads: int, table_columns: int, *, grouped: bool
    ) -> NDArray[np.int32]:
        """Plan a launch; see :func:`kernel.plan.plan_prefill`.

        Args:
            lengths: of the requests to score.
            num_heads: H.
            table_columns: columns of the block table.
            grouped: whether launches may want maxima.

        Returns:
            ``[items, WORK_ITEM_DWORDS]`` int32, for score buffers of any width.

        Raises:
            InvalidArgumentError: a number does not fit the 32 bits it has on the device.
        """
        plan = self._plans.plan(
            lengths.requests(),
            num_heads,
            table_stride=table_columns,
            score_blocks=MOST_SCORE_BLOCKS,
            slots=_WORKGROUPS_PER_COMPUTE_UNIT * self._device.compute_units,
            alignment=MAXIMA_BLOCKS if grouped else STORE_BLOCKS,
        )
        return np.frombuffer(bytearray(plan.words), dtype=np.int32).reshape(-1, WORK_ITEM_DWORDS)

    def launch(
        self,
        batch: ScoreBatch,
        work: torch.Tensor,
        scores: torch.Tensor,
        maxima: torch.Tensor | None = None,
        run: Run | None = None,
    ) -> None:
        """Score a launch's work; asynchronous on a GPU.

        Args:
            batch: queries, pages, block table, LUT and forced blocks, on this device; not its requests.
            work: of :meth:`work`, on this device.
            scores: ``[H, total_q, S]`` float32 with ``stride(2) == 1``; every cell of a row of the requests
                is written.
            maxima: ``[H, total_q, ceil(S / 16)]`` float32 with ``stride(2) == 1``, written likewise: the
                greatest score of each 16 blocks, sentinels included. The work must be ``grouped``.
            run: what this is part of, if it may be repeated.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            DeviceUnavailableError: the kernel may not be compiled here and is not in FlyDSL's cache.
            InvalidArgumentError: a number does not fit the 32 bits it has on the device.
        """
        columns = scores.shape[2]
        if not work.shape[0] or not columns:
            return
        _check_width("scores.shape[2]", columns, MOST_SCORE_BLOCKS + 1)
        _check_width("pages.shape[0]", batch.pages.shape[0], _INT32)
        q, lut = aligned(batch.q), aligned(batch.lut)
        tensors = [q, batch.pages, lut, scores, batch.block_table, work]
        if maxima is not None:
            tensors.append(maxima)
        for chunk in launches(work.shape[0]):
            arguments = PrefillArguments(
                **_operands(batch, q, lut, scores, maxima),
                work=work.data_ptr() + 4 * WORK_ITEM_DWORDS * chunk.start,
                num_pages=batch.pages.shape[0],
                score_blocks=columns,
                init_blocks=batch.init_blocks,
                local_blocks=batch.local_blocks,
            )
            (run or Run()).launch(self._kernels, batch.num_heads, tensors, arguments, len(chunk))


def _build_prefill(heads: int) -> Launch:
    from kernel.backends.flydsl import prefill

    return prefill.build(heads)


def _operands(
    batch: ScoreBatch, q: torch.Tensor, lut: torch.Tensor, scores: torch.Tensor, maxima: torch.Tensor | None
) -> dict[str, int]:
    """The arguments that both scorers take.

    Args:
        batch: the call, but for its queries and LUT.
        q: its queries, aligned.
        lut: its LUT, aligned.
        scores: written.
        maxima: written, if any are wanted.
    """
    return {
        "q": q.data_ptr(),
        "pages": batch.pages.data_ptr(),
        "page_stride": batch.pages.stride(0),
        "lut": lut.data_ptr(),
        **_rows("score", "scores", scores),
        **_rows("maxima", "maxima", maxima),
        "table": batch.block_table.data_ptr(),
    }


def _rows(kind: str, name: str, rows: torch.Tensor | None, first: int = 0) -> dict[str, int]:
    """Arguments of a ``[H, total_q, _]`` tensor of 4-byte cells: address of row ``[0, first]``, strides in
    cells; 0 for None."""
    address, head, token = (
        (0, 0, 0)
        if rows is None
        else (rows.data_ptr() + 4 * first * rows.stride(1), rows.stride(0), rows.stride(1))
    )
    return {name: address, f"{kind}_head_stride": head, f"{kind}_token_stride": token}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy aligned to the kernels' operand loads."""
    return tensor if tensor.data_ptr() % OPERAND_BYTES == 0 else tensor.clone()


# ---- Decode: grid and arguments depend on shapes only, never on lengths ----

_INT32 = 2**31


@dataclass(frozen=True)
class DeviceRequests:
    """The requests of a launch as the kernel reads them: four contiguous ``[batch]`` int32 tensors on the
    device.

    Attributes:
        table_rows: the request's row in the block table.
        query_starts: its first query token in ``q``.
        query_ends: the token after its last; a request without queries pads the batch.
        seq_lens: its keys; a request without keys pads the batch.
    """

    table_rows: torch.Tensor
    query_starts: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor

    @staticmethod
    def of(fields: torch.Tensor) -> DeviceRequests:
        """Requests from :func:`request_fields` on the device."""
        return DeviceRequests(*fields.unbind())


def request_fields(lengths: Lengths) -> NDArray[np.int32]:
    """The fields of :class:`DeviceRequests`, ``[4, n]``, of requests whose lengths the host knows."""
    ends = lengths.query_starts + lengths.query_lens
    return np.stack((lengths.table_rows, lengths.query_starts, ends, lengths.seq_lens)).astype(np.int32)


class DecodeLauncher:
    """Scores requests of few query rows on one device.

    One launcher serves one device. May be used from several threads.

    Args:
        device: where to launch.
        layout: page staging.

    Raises:
        DeviceUnavailableError: something that launching or compiling needs is missing.
    """

    def __init__(self, device: Device, layout: Layout = DEFAULT_LAYOUT) -> None:
        self._device = device

        def name_of(heads: int) -> str:
            return geometry.decode_name(heads, layout)

        def build(heads: int) -> Launch:
            from kernel.backends.flydsl import decode

            return decode.build(heads, layout)

        self._kernels = kernels_on(device, name_of, build)

    def launch(
        self,
        batch: ScoreBatch,
        requests: DeviceRequests,
        scores: torch.Tensor,
        maxima: torch.Tensor | None = None,
        *,
        fill: bool = True,
        num_blocks: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_blocks: int | None = None,
        run: Run | None = None,
    ) -> None:
        """Score requests whose lengths only the device knows; asynchronous on a GPU.

        The launch depends on shapes and addresses alone, so a captured one may be replayed after any of the
        tensors' values have changed. The kernel clamps values: page ids to the cache, requests to the rows of
        ``q``, the bounds below, the columns of the block table and the scores, and ``MAX_ROWS`` query rows;
        see :func:`kernel.step.clamped_lengths`.

        Args:
            batch: queries, pages, block table, LUT and forced blocks, on this device; not its requests.
            requests: what to score.
            scores: ``[H, total_q, S]`` float32 with ``stride(2) == 1``.
            maxima: ``[H, total_q, ceil(S / 16)]`` float32 with ``stride(2) == 1``: the greatest score of each
                16 blocks, sentinels included.
            fill: write ``-inf`` from a request's last block to ``S``.
            num_blocks: ``[total_q]`` int32, contiguous: ``nb`` is written for query tokens that are scored.
            max_query_len: queries of a request that are scored, at most.
            max_blocks: blocks of a request, at most.
            run: what this is part of, if it may be repeated.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            InvalidArgumentError: a number does not fit the 32 bits it has on the device.
        """
        num_requests, columns = requests.seq_lens.shape[0], scores.shape[2]
        height, width = batch.block_table.shape
        if not num_requests or not columns or not width or not batch.total_q:
            return
        _check_widths(batch, num_requests, columns)
        most_blocks = min(columns, width, MAX_SEQ_BLOCKS if max_blocks is None else max_blocks)
        most_queries = MAX_ROWS // batch.num_heads
        log_workgroups = grid_log2(num_requests, most_blocks, maxima is not None, self._device.compute_units)
        q, lut = aligned(batch.q), aligned(batch.lut)
        numbers = vars(requests)
        tensors = [q, batch.pages, lut, scores, batch.block_table, *numbers.values()]
        tensors += [tensor for tensor in (maxima, num_blocks) if tensor is not None]
        arguments = DecodeArguments(
            **_operands(batch, q, lut, scores, maxima),
            **{name: tensor.data_ptr() for name, tensor in numbers.items()},
            num_blocks=0 if num_blocks is None else num_blocks.data_ptr(),
            table_height=height,
            table_width=width,
            batch=num_requests,
            total_q=batch.total_q,
            num_pages=batch.pages.shape[0],
            max_query_len=most_queries if max_query_len is None else min(max_query_len, most_queries),
            max_seq_len=most_blocks * BLOCK_TOKENS,
            fill_end=columns if fill else 0,
            init_blocks=min(batch.init_blocks, columns),
            local_blocks=min(batch.local_blocks, columns),
            log_workgroups=log_workgroups,
        )
        (run or Run()).launch(self._kernels, batch.num_heads, tensors, arguments, 1 << log_workgroups)


def grid_log2(num_requests: int, blocks: int, maxima: bool, compute_units: int) -> int:
    """Log2 of a launch's workgroups: as many as fill the device, fewer where shapes bound the work.

    Args:
        num_requests: requests, padding included.
        blocks: the most that one may have.
        maxima: whether group maxima are wanted; a workgroup then has a group of 16 blocks at least.
        compute_units: of the device.
    """
    most = num_requests * -(-blocks // (MAXIMA_BLOCKS if maxima else WAVES))
    fill = (_WORKGROUPS_PER_COMPUTE_UNIT * compute_units).bit_length() - 1
    return min(fill, (most - 1).bit_length())


def _check_widths(batch: ScoreBatch, num_requests: int, columns: int) -> None:
    limits = (
        ("block_table.numel()", batch.block_table.numel(), _INT32),
        ("num_requests * S", num_requests * min(columns, batch.block_table.shape[1]), _INT32),
        ("total_q * H", batch.total_q * batch.num_heads, _INT32 - MAX_ROWS),
        ("scores.shape[2]", columns, _INT32 - 2 * MAXIMA_BLOCKS),
        ("pages.shape[0]", batch.pages.shape[0], _INT32),
    )
    for limited in limits:
        _check_width(*limited)


def _check_width(name: str, value: int, limit: int) -> None:
    if value >= limit:
        raise InvalidArgumentError(name, value, f"must be below {limit}", "split the batch")


# ---- Top-k ----

_MAX_HEADS = 65_535
"""Workgroups of a grid's second dimension."""
_MAX_LAUNCH_TOKENS = 1 << 24
"""A grid holds 2^32 threads at most: launches are chunked."""


class TopkLauncher:
    """Selects rows' best blocks on one device; see :class:`kernel.backends.flydsl.launch.PrefillLauncher`."""

    def __init__(self, device: Device) -> None:
        self._kernels = kernels_on(device, lambda variant: variant.name, _build_topk)

    def __call__(
        self,
        scores: torch.Tensor,
        num_blocks: torch.Tensor,
        block_ids: torch.Tensor,
        order: Order,
        maxima: torch.Tensor | None = None,
        run: Run | None = None,
    ) -> None:
        """Select; asynchronous on a GPU.

        Args:
            scores: ``[H, total_q, S]`` float32; only the first ``num_blocks`` cells of a row are read.
            num_blocks: ``[total_q]`` int32.
            block_ids: ``[H, total_q, k]`` int32, written.
            order: see :data:`kernel.backends.base.Order`.
            maxima: ``[H, total_q, ceil(S / 16)]`` float32, the greatest score of each 16 blocks below
                ``num_blocks``: then only they and the ``k`` best groups of a row are read.
            run: what this is part of, if it may be repeated.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            InvalidArgumentError: a row is longer than the kernels can count.
        """
        heads, tokens, columns = scores.shape
        k = block_ids.shape[2]
        if columns > MAX_BLOCKS:
            raise InvalidArgumentError(
                "scores.shape[2]", columns, f"must be at most {MAX_BLOCKS}", "shorten the rows"
            )
        if not (heads and tokens and k):
            return
        if heads > _MAX_HEADS:
            raise InvalidArgumentError("scores.shape[0]", heads, f"must be at most {_MAX_HEADS}", "split it")
        scores, num_blocks = _with_rows_of_cells(scores), num_blocks.contiguous()
        tensors = [scores, num_blocks, block_ids]
        if maxima is not None:
            maxima = _with_rows_of_cells(maxima)
            tensors.append(maxima)
        written = block_ids if block_ids.stride(2) == 1 or k == 1 else torch.empty_like(block_ids)
        variant = variant_for(k, columns, maxima is not None)
        rows = WAVES * variant.rows_per_wave
        for first in range(0, tokens, _MAX_LAUNCH_TOKENS):
            num = min(tokens - first, _MAX_LAUNCH_TOKENS)
            arguments = TopkArguments(
                **_rows("score", "scores", scores, first),
                **_rows("maxima", "maxima", maxima, first),
                num_blocks=num_blocks.data_ptr() + 4 * first,
                **_rows("id", "block_ids", written, first),
                columns=columns,
                num_tokens=num,
                k=k,
                ascending=int(order == "block"),
            )
            grid = -(-num // rows), heads
            (run or Run()).launch(self._kernels, variant, [*tensors, written], arguments, *grid)
        if written is not block_ids:
            block_ids.copy_(written)


def _build_topk(variant: Variant) -> Launch:
    from kernel.backends.flydsl import topk

    return topk.build(variant)


def _with_rows_of_cells(rows: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is contiguous."""
    return rows if rows.shape[2] < 2 or rows.stride(2) == 1 else rows.contiguous()


# ---- Insert ----

_MAX_LAUNCH_KEYS = 1 << 27
"""A grid holds 2^32 threads at most, eight a key: launches are chunked."""


class InsertLauncher:
    """Inserts keys on one device; see :class:`kernel.backends.flydsl.launch.PrefillLauncher`."""

    def __init__(self, device: Device) -> None:
        self._kernels = kernels_on(device, geometry.insert_name, _build_insert)

    def __call__(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise and scatter; asynchronous on a GPU. See :meth:`kernel.backends.base.Backend.insert`.

        A slot past the pages is skipped like a negative one: refusing it would mean waiting for its value.

        Raises:
            LaunchError: a HIP call failed; what the slots hold is undefined.
        """
        if not keys.shape[0] or not pages.shape[0]:
            return
        key_bytes = keys.element_size()
        alignment = LOAD_BYTES
        if keys.stride(1) != 1 or keys.stride(0) * key_bytes % alignment or keys.data_ptr() % alignment:
            keys = keys.clone(memory_format=torch.contiguous_format)
        slots = slots.contiguous()
        key_stride = keys.stride(0) * key_bytes
        for first in range(0, keys.shape[0], _MAX_LAUNCH_KEYS):
            num = min(keys.shape[0] - first, _MAX_LAUNCH_KEYS)
            arguments = InsertArguments(
                keys=keys.data_ptr() + first * key_stride,
                key_stride=key_stride,
                slots=slots.data_ptr() + 8 * first,
                pages=pages.data_ptr(),
                page_stride=pages.stride(0),
                num_slots=pages.shape[0] * BLOCK_TOKENS,
                num_keys=num,
            )
            workgroups = -(-num // KEYS_PER_WORKGROUP)
            self._kernels.launch(KeyType.of(keys.dtype), [keys, pages, slots], *arguments, workgroups)


def _build_insert(key_type: KeyType) -> Launch:
    from kernel.backends.flydsl import insert

    return insert.build(key_type)
