"""Judges the whole set of mutants of kernels in as many processes as there are cores.

    python -m tests.mutation "score_decode_*" insert_bf16 --jobs 64

With NVFP4_INDEXER_TEST_ASSEMBLY set, kernels are read from NAME.s in that folder: then numpy, ml_dtypes,
torch and pytest are all that is needed. ``--save`` compiles what the folder lacks, and judges nothing. Prints
the line of each kernel that ``pytest -m nightly tests/mutation`` ends with, and every survivor; exits with 1
if there is one.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.pool import Pool

import torch

from tests.gfx950 import compiled
from tests.mutation.campaign import Executed, survivors
from tests.mutation.campaigns import NAMES, campaign, mutants_of
from tests.mutation.mutants import Mutant
from tests.mutation.score import Verdict, lines, recorded


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("patterns", nargs="*", default=["*"], help="kernels: score_decode_h1, 'insert_*'")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="judge one mutant in N")
    parser.add_argument("--save", action="store_true", help=f"only compile what ${compiled.FOLDER} lacks")
    given = parser.parse_args(arguments)
    names = [name for name in NAMES if any(fnmatch.fnmatch(name, one) for one in given.patterns)]
    if not names:
        parser.error(f"no kernel is named {' or '.join(given.patterns)}; there are {', '.join(NAMES)}")
    if given.save and compiled.FOLDER not in os.environ:
        parser.error(f"--save needs {compiled.FOLDER}, the folder to compile into")
    torch.set_num_threads(1)  # in each process
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(compiled.FOLDER, folder)
        for name in names:
            compiled.assembly(name)
        return 0 if given.save else _judge(names, given.jobs, given.every)


def _judge(names: Sequence[str], jobs: int, every: int) -> int:
    """Prints the scores, returns the exit code. Each pool is forked with what the parent knows by then."""
    begin = time.perf_counter()
    launches = [
        (name, of_sweep, at)
        for name in names
        for of_sweep in (False, True)
        for at in range(len(campaign(name).sweep if of_sweep else campaign(name).launches))
    ]
    with _pool(jobs) as pool:
        executed = dict(zip(launches, pool.map(_executed, launches, chunksize=1)))
    for name in names:
        found = campaign(name)
        found.executed = [executed[name, False, at] for at in range(len(found.launches))]
        found.executed_by_sweep = [executed[name, True, at] for at in range(len(found.sweep))]
    with _pool(jobs) as pool:
        sets = pool.map(mutants_of, names, chunksize=1)
        print(f"{time.perf_counter() - begin:.0f} s: {sum(map(len, sets))} mutants", file=sys.stderr)
    verdicts: dict[str, list[Verdict]] = {name: [] for name in names}
    left = {name: len(mutants[::every]) for name, mutants in zip(names, sets)}
    tasks = [(name, mutant) for name, mutants in zip(names, sets) for mutant in mutants[::every]]
    exit_code = 0
    with _pool(jobs) as pool:
        for name, verdict in pool.imap_unordered(_verdict, tasks):
            verdicts[name].append(verdict)
            left[name] -= 1
            if not left[name]:
                print(*lines([recorded(name, (one.outcome for one in verdicts[name]))]), flush=True)
                print(f"{time.perf_counter() - begin:.0f} s: {name}", file=sys.stderr)
                for line in survivors(campaign(name).kernel, verdicts[name]):
                    print(f"  SURVIVED {line}", flush=True)
                    exit_code = 1
    return exit_code


def _pool(jobs: int) -> Pool:
    return multiprocessing.get_context("fork").Pool(jobs)


def _executed(launch: tuple[str, bool, int]) -> Executed:
    name, of_sweep, at = launch
    found = campaign(name)
    executed: Executed = found.run((found.sweep if of_sweep else found.launches)[at])
    return executed


def _verdict(task: tuple[str, Mutant]) -> tuple[str, Verdict]:
    name, mutant = task
    return name, campaign(name).judge(mutant)


if __name__ == "__main__":
    sys.exit(main())
