"""Case files of real activations, against expected outputs of an independent implementation.

Some are here; a folder named by NVFP4_INDEXER_CASES, or shared/cases beside the clone, may have more.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kernel import nvfp4
from kernel.backends import registry
from kernel.backends.base import SCORE_TOLERANCE, Backend
from kernel.backends.reference import ReferenceBackend
from kernel.backends.reference.backend import score_bounds
from kernel.errors import InvalidArgumentError
from kernel.page import blocks_of, codes_of, scales_of
from tests.support.calls import RAGGED, Call, random_call
from tests.support.cases import ROOT
from tests.support.compare import assert_same_bits, inserted, oracle_scores, scores_of, selection_of, topk_of

HERE = sorted((ROOT / "tests" / "data").glob("*.safetensors"))
ELSEWHERE = Path(os.environ.get("NVFP4_INDEXER_CASES", ROOT.parent / "shared" / "cases"))


def case_files() -> list[object]:
    """Every case file, or why there are no more."""
    more = sorted(ELSEWHERE.glob("*.safetensors"))
    if not more:
        reason = f"no case files in {ELSEWHERE}: set NVFP4_INDEXER_CASES to a folder of some"
        return [*HERE, pytest.param(ELSEWHERE, marks=pytest.mark.skip(reason=reason), id="more cases")]
    return [*HERE, *more]


def load(path: Path, backend: Backend) -> tuple[Call, dict[str, torch.Tensor], int]:
    """A case as a call whose keys the backend inserted, on permuted pages; its tensors; k."""
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    blocks = [blocks_of(seq_len) for seq_len in tensors["seq_lens"].tolist()]
    page_ids = torch.randperm(2 * sum(blocks), generator=torch.Generator().manual_seed(0))
    block_table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32)
    slots, first_block = [], 0
    for row, (num_blocks, seq_len) in enumerate(zip(blocks, tensors["seq_lens"].tolist())):
        own = page_ids[first_block : first_block + num_blocks]
        block_table[row, :num_blocks] = own
        tokens = torch.arange(seq_len)
        slots.append(own[tokens // 128] * 128 + tokens % 128)
        first_block += num_blocks
    pages = torch.full((2 * sum(blocks), 9216), 0x7E, dtype=torch.uint8)
    call = Call(
        q=nvfp4.quantize_query(tensors["index_q"]),
        pages=inserted(backend, tensors["index_k"], pages, torch.cat(slots)),
        block_table=block_table,
        cu_seqlens_q=tensors["cu_seqlens_q"],
        seq_lens=tensors["seq_lens"],
        init_blocks=int(metadata["init_blocks"]),
        local_blocks=int(metadata["local_blocks"]),
    )
    return call, tensors, int(metadata["topk"])


@pytest.mark.parametrize("path", case_files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_scores_and_selection_are_the_expected_ones(backend: Backend, path: Path) -> None:
    """Outlier channels, heavy tails: scores within the bound, the oracle's bit for bit; the same selection.

    Two blocks may change places only where the bound covers the difference of their scores.
    """
    call, tensors, topk = load(path, backend)
    expected, expected_ids = tensors["expected_scores"], tensors["expected_block_ids"]
    scores = scores_of(backend, call)
    selection = selection_of(backend, call, topk)
    num_blocks = call.batch().num_blocks_per_query()
    assert_same_bits(topk_of(backend, scores, num_blocks, topk), selection)
    if isinstance(backend, ReferenceBackend):
        assert_same_bits(scores, expected)
        assert_same_bits(selection, expected_ids)
        return
    allowed = SCORE_TOLERANCE[backend.precision] * torch.from_numpy(score_bounds(call.batch()))
    assert bool(((scores == expected) | ((scores.double() - expected.double()).abs() <= allowed)).all())
    moved = selection != expected_ids
    assert bool(((selection < 0) == (expected_ids < 0)).all())
    got, want = (expected.double().gather(2, ids.clamp(min=0).long()) for ids in (selection, expected_ids))
    widest = 2 * allowed.amax(2, keepdim=True).expand_as(got)
    assert bool(((got - want).abs()[moved] <= widest[moved]).all())


# The oracle itself: its device and precision, and the bounds that other backends are measured by.


def test_bounds_are_the_largest_sum_of_magnitudes_of_a_cell() -> None:
    """sum_i |q_i k_i|, its maximum over the cell's causal tokens: one request by plain loops over fp64."""
    call = random_call([(290, 40)], 2, seed=81, values="inexact")
    bounds = score_bounds(call.batch())
    pages = call.pages[call.block_table[0, :3].long()]
    keys = nvfp4.dequantize(codes_of(pages), scales_of(pages)).flatten(0, 1).double().abs()
    queries = call.q.double().abs()
    for token in (0, 5, 6, 39):
        sums = queries[token] @ keys[: 250 + token + 1].T
        for block in range(3):
            seen = sums[:, 128 * block : 128 * (block + 1)]
            expected = seen.amax(1).tolist() if seen.shape[1] else [0.0, 0.0]
            assert bounds[:, token, block].tolist() == expected


def test_scores_never_exceed_their_bounds() -> None:
    """|q . k| <= sum_i |q_i k_i|; both are 0 where nothing is visible."""
    call = random_call(RAGGED, 4, seed=82, values="inexact")
    scores, bounds = oracle_scores(call).numpy().astype(np.float64), score_bounds(call.batch())
    visible = np.isfinite(scores)
    assert (np.abs(scores[visible]) <= bounds[visible] * (1 + 2.0**-24)).all()
    assert (bounds[~visible] == 0).all()


def test_scores_are_exact_whatever_the_order_of_summation() -> None:
    """A permutation of the dims permutes the sum and changes no bit: fp64 holds every partial sum."""
    call = random_call([(512, 64)], 1, seed=83, values="inexact")
    pages = call.pages[call.block_table[0, :4].long()]
    keys = nvfp4.dequantize(codes_of(pages), scales_of(pages)).flatten(0, 1).double()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    products = call.q.double()[:, 0][:, order] @ keys[:, order].T
    products.masked_fill_(torch.arange(512) > torch.arange(448, 512)[:, None], -torch.inf)
    expected = products.view(64, 4, 128).amax(2).float()
    assert torch.equal(oracle_scores(call)[0], expected)


def test_only_the_cpu_and_exact_arithmetic_are_offered() -> None:
    """Another device or precision is refused by name."""
    with pytest.raises(InvalidArgumentError, match=r"^device = 'cuda:0': must be 'cpu'"):
        registry.create("reference", "cuda:0")
    with pytest.raises(InvalidArgumentError, match=r"^precision = 'fast': must be 'exact'"):
        registry.create("reference", precision="fast")
    assert registry.create("reference", "cpu").precision == "exact"
