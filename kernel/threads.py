"""Tasks of a call on several threads, each operation on the thread that calls it.

An operation that torch spreads over threads ends in a barrier at which they spin. Where another process has
one of the cores, every operation waits for the thread that lost its core, up to a time slice. So an operation
here stays on one thread, and threads take tasks as they become free: one that is held up takes fewer.

How many threads an operation takes is a setting of the thread that calls it, in OpenMP and in MKL.
``torch.set_num_threads`` would change the default of the whole process, too, so both libraries are called.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

HELPER_NAME = "nvfp4-indexer-cpu"
"""Of the threads that help with a call."""
T = TypeVar("T")


class _Setters(NamedTuple):
    openmp: Callable[[int], None]
    mkl: Callable[[int], int] | None
    """Gives the setting before, 0 for that of the process; None where torch has no MKL."""


@functools.cache
def _setters() -> _Setters | None:
    """Of the libraries that torch calls; None where it is built otherwise."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            library = ctypes.PyDLL(str(path))
            return _Setters(library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", None))
        except (OSError, AttributeError):
            continue
    return None


@contextmanager
def on_one_thread() -> Iterator[int]:
    """Keep the operations of this thread on it; gives how many threads they would have had.

    Gives 1 where torch's libraries cannot be told: operations take the threads that they take.
    """
    threads, setters = torch.get_num_threads(), _setters()
    if threads == 1 or setters is None:
        yield 1
        return
    before = setters.mkl(1) if setters.mkl is not None else 0
    setters.openmp(1)
    try:
        yield threads if torch.get_num_threads() == 1 else 1
    finally:
        setters.openmp(threads)
        if setters.mkl is not None:
            setters.mkl(before)


def run_tasks(tasks: Iterator[Callable[[T], None]], workspace: Callable[[], T], threads: int) -> None:
    """Run tasks on this thread and helpers, which end with the call; the first error is raised here.

    Args:
        tasks: taken one at a time, in their order; each is given its thread's workspace.
        workspace: makes it.
        threads: this one included; fewer where the system has no more.
    """
    lock, errors = threading.Lock(), list[BaseException]()
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        own = workspace()
        while not errors:
            with lock:
                task = next(tasks, None)
            if task is None:
                return
            task(own)

    def help_out() -> None:
        try:
            with torch.inference_mode(inference), on_one_thread():
                work()
        except BaseException as error:
            errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        for _ in range(threads - 1):
            helper = threading.Thread(target=help_out, name=HELPER_NAME, daemon=True)
            helper.start()
            helpers.append(helper)
    except RuntimeError:  # no more threads: those that there are do all tasks
        pass
    try:
        work()
    except BaseException as error:
        errors.append(error)
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:  # an interrupt: nothing may write on after the call
                errors.append(error)
    if errors:
        raise errors[0]
