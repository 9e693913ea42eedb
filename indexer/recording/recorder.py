"""Captures an engine's calls without holding it up: sampled, bounded, written in the background."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

import torch

from indexer.case import Case, EngineOrder, write_case
from indexer.recording.snapshot import CaptureOptions, Integers, snapshot
from kernel.arguments import as_int, check_bool
from kernel.errors import InvalidArgumentError

MAX_BYTES = 1 << 30
"""Largest file unless told otherwise."""
PENDING = 2
"""Calls copied and not yet written, at most: what a slow disk can hold of the host's memory."""
_LOG = logging.getLogger(__name__)


def capture(
    path: str | os.PathLike[str],
    index_q: torch.Tensor,
    pages: torch.Tensor,
    block_table: Integers,
    cu_seqlens_q: Integers,
    seq_lens: Integers,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    scores: torch.Tensor | None = None,
    block_ids: torch.Tensor | None = None,
    order: EngineOrder = "any",
    new_keys: torch.Tensor | None = None,
    layer: int | None = None,
    source: str = "",
    max_bytes: int = MAX_BYTES,
    wrapped_pages: bool = False,
) -> None:
    """Write one call of an engine as a case file, whole or not at all.

    Each tensor may lie on a device of its own and have any strides. Requests after the last one with keys,
    and their rows, are a captured graph's padding and are left out.

    Args:
        path: the file; its folder is made.
        index_q: ``[>= total_q, H, 128]`` bf16, fp16, fp32 or float8_e4m3fn; rows past ``cu_seqlens_q[-1]``
            are left out, and so they are of ``scores``, ``block_ids`` and ``new_keys``.
        pages: the engine's cache: NVFP4 ``[num_pages, 9216]`` or ``[num_pages, 128, 72]`` uint8, any page
            stride; or keys ``[num_pages, 128, 128]`` bf16, fp16, fp32 or float8_e4m3fn. Only pages in use are
            copied.
        block_table: ``[>= batch, max_blocks]`` int32 or int64, or whole numbers on the host (a list, a tuple,
            a numpy array), as are the next two.
        cu_seqlens_q: ``[batch + 1]``, exclusive prefix sums of the query lengths.
        seq_lens: ``[>= batch]``, this step's tokens included.
        topk: blocks a row selects.
        init_blocks: blocks forced at a row's start.
        local_blocks: blocks forced at a row's end.
        scores: ``[H, >= total_q, S]`` fp32, bf16 or fp16, the engine's.
        block_ids: ``[H, >= total_q, topk]`` int32 or int64, the engine's.
        order: the order of a row's ``block_ids``: ``score``, ``block``, or ``any`` if only the set counts.
        new_keys: ``[>= total_q, 128]`` bf16, fp16 or fp32 keys that this step wrote, before quantisation.
        layer: the model's layer.
        source: where the call comes from, human-readable.
        max_bytes: largest file.
        wrapped_pages: also keep the pages that offsets of 32 bits would read instead; up to three times as
            many in a cache of more than 2 GiB.

    Raises:
        InvalidArgumentError: the call is not one that a case can hold, or larger than ``max_bytes``, or its
            stream records a CUDA or HIP graph; nothing was written.
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    target = _path("path", path)
    case = snapshot(
        index_q,
        pages,
        block_table,
        cu_seqlens_q,
        seq_lens,
        CaptureOptions(
            topk=topk,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            scores=scores,
            block_ids=block_ids,
            order=order,
            new_keys=new_keys,
            layer=layer,
            source=source,
            max_bytes=max_bytes,
            wrapped_pages=wrapped_pages,
        ),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_case(case, target)


class Recorder:
    """Captures some of an engine's calls into a folder. May be used from several threads.

    A call that is not captured costs a lock and a comparison. One that is costs the copy; its file is written
    by a thread of the recorder. Nothing but ``KeyboardInterrupt`` and its like leaves :meth:`capture`, unless
    ``strict``: an error is logged as a warning once for each argument and kind, and how many more there were
    at :meth:`close`.

    Args:
        folder: where the files go; made when the first one is written.
        every: of so many calls one is captured, the first one too.
        max_count: captures in all.
        max_bytes: largest file; a larger call is an error and is not captured.
        strict: errors leave :meth:`capture` and :meth:`flush`.
        on_error: told of each error, from whichever thread met it, in place of the log.

    Raises:
        InvalidArgumentError: a number that is not 1 or more, or another argument of a wrong type.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        max_count: int = 16,
        max_bytes: int = MAX_BYTES,
        strict: bool = False,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        for name, value in (("every", every), ("max_count", max_count), ("max_bytes", max_bytes)):
            if (as_int(value) or 0) < 1:
                raise InvalidArgumentError(name, repr(value), "must be a whole number, 1 or more", "raise it")
        check_bool("strict", strict)
        if on_error is not None and not callable(on_error):
            raise InvalidArgumentError("on_error", repr(on_error), "must be callable", "pass a function")
        self.folder = _path("folder", folder)
        self._every, self._max_count, self._max_bytes = every, max_count, max_bytes
        self._strict, self._on_error = strict, on_error
        self._lock = threading.RLock()
        self._calls = self._taken = 0
        self._room = threading.Semaphore(PENDING)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="nvfp4-indexer-recorder")
        self._writes: list[object] = []
        self._failed: Exception | None = None
        self._logged: set[tuple[str, str]] = set()
        self._not_logged = 0
        # A process id alone would repeat: in a container it is the same at every start.
        self._prefix = f"capture-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def capture(
        self,
        index_q: torch.Tensor,
        pages: torch.Tensor,
        block_table: Integers,
        cu_seqlens_q: Integers,
        seq_lens: Integers,
        *,
        topk: int = 16,
        init_blocks: int = 0,
        local_blocks: int = 1,
        scores: torch.Tensor | None = None,
        block_ids: torch.Tensor | None = None,
        order: EngineOrder = "any",
        new_keys: torch.Tensor | None = None,
        layer: int | None = None,
        source: str = "",
        wrapped_pages: bool = False,
    ) -> bool:
        """Capture this call if it is one of the sample: :func:`capture` says what the arguments are.

        Returns:
            Whether the call was copied.

        Raises:
            Exception: only if ``strict``, what :func:`capture` raises.
        """
        number = self._number()
        if number is None:
            return False
        try:
            case = snapshot(
                index_q,
                pages,
                block_table,
                cu_seqlens_q,
                seq_lens,
                CaptureOptions(
                    topk=topk,
                    init_blocks=init_blocks,
                    local_blocks=local_blocks,
                    scores=scores,
                    block_ids=block_ids,
                    order=order,
                    new_keys=new_keys,
                    layer=layer,
                    source=source,
                    max_bytes=self._max_bytes,
                    wrapped_pages=wrapped_pages,
                ),
            )
            self._submit(case, number)
        except BaseException as error:
            with self._lock:
                self._taken -= 1
            self._room.release()
            if self._strict or not isinstance(error, Exception):
                raise
            self._tell(error)
            return False
        return True

    def flush(self) -> None:
        """Wait until every capture so far is on disk.

        Raises:
            Exception: only if ``strict``, the first error of writing since the last flush.
        """
        with self._lock:
            writes, self._writes = self._writes, []
        wait(writes)  # type: ignore[arg-type]
        failed, self._failed = self._failed, None
        if self._strict and failed is not None:
            raise failed

    def close(self) -> None:
        """Flush, and capture nothing more."""
        with self._lock:
            self._max_count = 0
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            with self._lock:
                count, self._not_logged = self._not_logged, 0
            if count:
                _LOG.warning("%d more calls were not captured, for reasons that were logged before", count)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _number(self) -> int | None:
        """The number of the capture, if this call is to be one and there is room for it."""
        with self._lock:
            due = self._calls % self._every == 0
            self._calls += 1
            if not due or self._taken >= self._max_count or not self._room.acquire(blocking=False):
                return None
            self._taken += 1
            return self._taken - 1

    def _submit(self, case: Case, number: int) -> None:
        layer = "" if case.engine is None or case.engine.layer is None else f"-layer{case.engine.layer}"
        path = self.folder / f"{self._prefix}-{number:04d}{layer}.safetensors"
        write = self._writer.submit(self._write, case, path)
        with self._lock:
            self._writes.append(write)

    def _write(self, case: Case, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_case(case, path)
        except Exception as error:
            self._failed = self._failed or error
            self._tell(error)
        finally:
            self._room.release()

    def _tell(self, error: Exception) -> None:
        try:
            if self._on_error is not None:
                self._on_error(error)
            elif self._first_of_its_kind(error):
                _LOG.warning("a call was not captured: %s (logged once)", error)
        except Exception:
            _LOG.exception("the error handler of a recorder failed")

    def _first_of_its_kind(self, error: Exception) -> bool:
        """A wrong argument is wrong at every call: an engine's log must not fill with it."""
        subject = getattr(error, "argument", None) or getattr(error, "errno", None)
        kind = (type(error).__name__, str(subject).partition("[")[0])
        with self._lock:
            if kind in self._logged:
                self._not_logged += 1
                return False
            self._logged.add(kind)
            return True


def _path(argument: str, path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgumentError(argument, repr(path), "must be a str or a Path", "name it as text")
    return Path(path)
