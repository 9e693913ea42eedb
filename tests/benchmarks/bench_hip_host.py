"""Host time of a run of a flydsl plan over a stand-in HIP whose launches return at once.

    python -m tests.benchmarks.bench_hip_host

No kernel is executed: what is measured is this program, torch and FlyDSL on this CPU, not a GPU. Each run of
``select`` is compared with the bare launches that it makes: FlyDSL's compiled functions, called with the same
arguments and nothing around them. Medians of batches of calls, microseconds of this thread's CPU time.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from indexer import IndexerConfig, IndexScorer
from kernel import operators
from kernel.backends.flydsl import launch
from kernel.gfx950.hip import simulated_device, standin
from kernel.gfx950.hip.standin import LAUNCH_CALLBACK
from tests.support.calls import random_call

CALLS, BATCHES = 200, 15
STEPS = ((1, 8192), (32, 8192), (128, 2048))
"""Requests of one query, and their keys."""


def microseconds(run: Callable[[], object]) -> float:
    """Of a call, the median over batches."""
    times = []
    for _ in range(BATCHES):
        started = time.thread_time()
        for _ in range(CALLS):
            run()
        times.append((time.thread_time() - started) / CALLS * 1e6)
    return statistics.median(times)


def bare_launches(run: Callable[[], None]) -> list[Callable[[], None]]:
    """The calls of compiled functions that a run makes, ready to be made again."""
    found: list[Callable[[], None]] = []
    compiled = launch._COMPILED

    def recorded(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            found.append(lambda: kernel(*arguments))
            kernel(*arguments)

        return call

    before = {key: dict(kernels) for key, kernels in compiled.items()}
    for kernels in compiled.values():
        kernels.update({name: recorded(kernel) for name, kernel in kernels.items()})
    try:
        run()
    finally:
        for key, kernels in compiled.items():
            kernels.update(before[key])
    return found


def main() -> None:
    """Prints a line for each step."""
    device = simulated_device()
    scorer = IndexScorer(IndexerConfig(4, 0, backend="flydsl-sim", device="cpu"))
    hip = standin.load(standin.library())
    at_once = ctypes.cast(hip.hipGetLastError, LAUNCH_CALLBACK)  # returns 0
    hip.sim_set_launch(at_once)

    def registered(_tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        return nullcontext()  # as on a GPU, which maps every allocation

    device.registered = registered  # type: ignore[method-assign, assignment]
    print("requests x keys    select  select_plan  bare launches  ratio")
    for requests, keys in STEPS:
        call = random_call([(keys, 1)] * requests, 4)
        plan = scorer.plan(call.block_table, query_lens=[1] * requests, seq_lens=[keys] * requests)
        out = torch.empty(4, requests, 16, dtype=torch.int32)
        backend = operators.backend_of(plan.backend, out.device)

        def select(plan=plan, call=call, out=out) -> None:  # type: ignore[no-untyped-def]
            plan.select(call.q, call.pages, out=out)

        def select_plan(plan=plan, call=call, out=out, backend=backend) -> None:  # type: ignore[no-untyped-def]
            backend.select_plan(plan.plan, call.q, call.pages, out)

        select()
        launches = bare_launches(select)
        bare = microseconds(lambda launches=launches: [launched() for launched in launches])  # type: ignore[misc]
        whole, inner = microseconds(select), microseconds(select_plan)
        print(f"{requests:8} x {keys:<8} {whole:6.1f} {inner:12.1f} {bare:14.1f} {whole / bare:6.2f}")


if __name__ == "__main__":
    main()
