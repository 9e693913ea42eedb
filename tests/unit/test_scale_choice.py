"""Four over six: the same bytes from both backends that have it, smaller errors, more of the selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.case import read_case
from indexer.fidelity import selection_recall, unquantised_scores
from indexer.replay import as_tensor
from kernel.backends.registry import CHOOSING_BACKENDS, create
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import dequantize, quantize_keys
from kernel.page import codes_of, scales_of
from tests.support.real_cases import CODE, more_case


def adversarial_keys() -> torch.Tensor:
    """Random groups, zeros, ties of the two errors, floors, saturation, and every value of bf16 in places."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(200, 128, generator=generator),
        torch.zeros(1, 128),
        torch.full((1, 128), 3.0),
        torch.randn(20, 128, generator=generator) * 2.0**-9,
        torch.randn(20, 128, generator=generator) * 2.0**-12,
        torch.randn(20, 128, generator=generator) * 1000,
        torch.tensor([0.0, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, -0.0, -5, -6, 0.25]).repeat(1, 8),
        torch.finfo(torch.float32).max * torch.ones(1, 128),
    ]
    return torch.cat(rows)


def pages_of(backend: str, choice: str, keys: torch.Tensor) -> torch.Tensor:
    pages = torch.zeros(-(-len(keys) // 128), 9216, dtype=torch.uint8)
    create(backend, scale_choice=choice).insert(keys, pages, torch.arange(len(keys)))  # type: ignore[arg-type]
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_backends_write_the_same_bytes(dtype: torch.dtype) -> None:
    keys = adversarial_keys()
    keys = keys[keys.to(dtype).isfinite().all(dim=1)].to(dtype)
    cpu, reference = (pages_of(backend, "four_over_six", keys) for backend in CHOOSING_BACKENDS)
    assert torch.equal(cpu, reference)
    assert not torch.equal(cpu, pages_of("cpu", "six", keys))


def test_six_stays_the_default() -> None:
    keys = adversarial_keys()
    for first, second in zip(quantize_keys(keys), quantize_keys(keys, "six")):
        assert torch.equal(first, second)
    pages = torch.zeros(3, 9216, dtype=torch.uint8)
    create("cpu").insert(keys, pages, torch.arange(len(keys)))
    assert torch.equal(pages, pages_of("cpu", "six", keys))
    assert IndexerConfig(num_index_heads=1, num_pages=1).scale_choice == "six"


def test_no_groups_largest_error_grows_and_a_scale_is_one_of_two() -> None:
    keys = adversarial_keys()
    errors, scales = {}, {}
    for choice in ("six", "four_over_six"):
        pages = pages_of("reference", choice, keys)
        read = dequantize(codes_of(pages), scales_of(pages)).flatten(0, 1)[: len(keys)]
        errors[choice] = (read.double() - keys.double()).abs().view(-1, 8, 16).amax(-1)
        scales[choice] = scales_of(pages).flatten(0, 1)[: len(keys)]
    assert (errors["four_over_six"] <= errors["six"]).all()
    changed = scales["six"] != scales["four_over_six"]
    assert 0.1 < changed.float().mean() < 0.9
    assert (errors["four_over_six"] < errors["six"])[changed].all()
    # 1.5 times the scale, within E4M3's rounding of either.
    as_float = {name: value.view(torch.float8_e4m3fn).float() for name, value in scales.items()}
    ratio = as_float["four_over_six"][changed] / as_float["six"][changed]
    assert ((ratio > 1.2) & (ratio <= 2.0)).all()


@pytest.mark.parametrize("name", ["code_8k_l20", "prose_8k_l10", "ragged_l15"])
def test_recall_on_real_activations_does_not_fall(name: str) -> None:
    case = read_case(CODE if name == CODE.stem else more_case(name))
    assert case.index_k is not None
    exact, means = unquantised_scores(case), {}
    for choice in ("six", "four_over_six"):
        blocks = int((-(-case.seq_lens.astype(np.int64) // 128)).sum())
        scorer = IndexScorer(
            IndexerConfig(
                num_index_heads=case.num_heads,
                num_pages=blocks,
                local_blocks=case.local_blocks,
                backend="cpu",
                scale_choice=choice,
            )
        )
        sequences = []
        for keys in torch.split(as_tensor(case.index_k), case.seq_lens.tolist()):
            sequences.append(scorer.add_sequence())
            scorer.append_keys(sequences[-1], keys)
        out = scorer.score(as_tensor(case.index_q), sequences, case.query_lens.tolist(), return_scores=False)
        means[choice] = selection_recall(case, exact, out.block_ids).mean
    assert means["four_over_six"] > means["six"]


def test_other_backends_refuse_it_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="scale_choice"):
        IndexerConfig(num_index_heads=1, num_pages=1, scale_choice="five")  # type: ignore[arg-type]
    if "flydsl-sim" in _usable():
        with pytest.raises(InvalidArgumentError, match="amax/6 only"):
            create("flydsl-sim", scale_choice="four_over_six")


def _usable() -> list[str]:
    from kernel.backends.registry import statuses

    return [found.name for found in statuses() if found.usable]
