"""Whether the choice of a group's scale could be better: recall of other ways to write NVFP4 keys.

    python -m tests.benchmarks.measure_scale_choice CASE...

A group of 16 may be written with the scale amax/6, as the contract has it, or with amax/4 where that gives a
smaller error ("4 over 6"): its largest code is then 4, and the grid near it is finer. Readers need no change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.case import Case, read_case
from indexer.fidelity import block_scores, selection_recall, unquantised_scores, with_sentinels
from indexer.oracle import select
from indexer.replay import as_tensor
from kernel.backends.reference.quantizer import (
    CODE_THRESHOLDS,
    E4M3_MAX,
    E4M3_MIN,
    dequantize_keys,
    e4m3_bytes,
    e4m3_values,
    quantize_query,
)

Floats = NDArray[np.float64]


def quantised(keys: Floats, top: float) -> tuple[Floats, Floats]:
    """Keys as scored, and the squared error of each group, if its largest value is scaled to ``top``."""
    groups = keys.reshape(len(keys), 8, 16)
    scales = e4m3_bytes(np.clip(np.abs(groups).max(axis=2) / top, E4M3_MIN, E4M3_MAX))
    thresholds = e4m3_values(scales)[:, :, None] * CODE_THRESHOLDS
    codes = (np.abs(groups)[..., None] > thresholds[:, :, None, :]).sum(axis=3) + np.where(groups < 0, 8, 0)
    scored = dequantize_keys(codes.reshape(keys.shape).astype(np.uint8), scales)
    return scored, np.square(scored.reshape(groups.shape) - groups)


def chosen(keys: Floats, error_of: Callable[[Floats], Floats]) -> Floats:
    """For each group the one of the two scales whose error is smaller, amax/6 if they are equal."""
    by_six, six = quantised(keys, 6.0)
    by_four, four = quantised(keys, 4.0)
    better = error_of(four) < error_of(six)
    return np.where(np.repeat(better, 16, axis=1), by_four, by_six)


WAYS: dict[str, Callable[[Floats], Floats]] = {
    "amax/6 (the contract)": lambda keys: quantised(keys, 6.0)[0],
    "amax/4": lambda keys: quantised(keys, 4.0)[0],
    "4 over 6, least squares": lambda keys: chosen(keys, lambda error: error.sum(axis=2)),
    "4 over 6, least maximum": lambda keys: chosen(keys, lambda error: error.max(axis=2)),
    "4 over 6, least sum": lambda keys: chosen(keys, lambda error: np.sqrt(error).sum(axis=2)),
}


def recall(case: Case, exact: torch.Tensor, keys: Floats) -> tuple[torch.Tensor, float]:
    """Recall of each row with a choice, and the root mean square of what scores are off."""
    queries = e4m3_values(quantize_query(case.index_q.astype(np.float64))).astype(np.float32)
    scores = block_scores(case, torch.from_numpy(queries), torch.from_numpy(keys.astype(np.float32)))
    finite = torch.isfinite(exact)
    off = float((scores[finite] - exact[finite]).double().square().mean().sqrt())
    ids = select(with_sentinels(case, scores).numpy(), case)
    found = selection_recall(case, exact, torch.from_numpy(ids))
    return found.per_row, off


def main(paths: list[str]) -> None:
    """Print a line for each way and case."""
    for path in paths:
        case = read_case(path)
        exact = unquantised_scores(case)
        if case.index_k is None:
            raise SystemExit(f"{path} has no index_k")
        keys = as_tensor(case.index_k).double().numpy()
        print(path)
        contract: torch.Tensor | None = None
        for name, way in WAYS.items():
            rows, off = recall(case, exact, way(keys))
            contract = rows if contract is None else contract
            gain = rows - contract
            error = float(gain.std() / gain.numel() ** 0.5)
            print(
                f"  {name:24} recall {rows.mean():.4f} mean, {rows.min():.3f} worst; against the contract "
                f"{gain.mean():+.4f} (standard error {error:.4f}); score rms error {off:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
