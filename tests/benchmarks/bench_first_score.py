"""Start-up to first score on the simulated gfx950: ``python -m tests.benchmarks.bench_first_score``.

With FLYDSL_RUNTIME_CACHE_DIR at an empty folder FlyDSL compiles; a second run loads from it. With
NVFP4_INDEXER_KERNEL_LIBRARY set nothing is traced. Importing the package is not in the time.
"""

from __future__ import annotations

import time

import torch

from indexer import IndexerConfig, IndexScorer


def main() -> None:
    wall, processor = time.perf_counter(), time.process_time()
    config = IndexerConfig(num_index_heads=4, num_pages=3, topk_blocks=2, backend="flydsl-sim", device="cpu")
    scorer = IndexScorer(config)
    sequence = scorer.add_sequence()
    scorer.append_keys(sequence, torch.ones(130, 128, dtype=torch.bfloat16))
    scorer.score(torch.ones(2, 4, 128), [sequence])
    print(f"{time.perf_counter() - wall:.2f} s, {time.process_time() - processor:.2f} s of CPU time")


if __name__ == "__main__":
    main()
