"""``IndexScorer(backend="flydsl-sim")``: FlyDSL's kernels, launcher and argument packing against the oracle.

Keys and queries are such that every partial sum is exact in fp32, so the scores must agree bit for bit; real
ones are compared within the tolerance of the contract.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.case.codec import read_case
from indexer.verify import verify_case
from kernel.backends import registry
from kernel.errors import DeviceUnavailableError, InvalidArgumentError, LaunchError
from kernel.gfx950.hip import code_object, simulated_device
from tests.gfx950.scorers import HEADS
from tests.support.cases import DATA, ROOT, more_case
from tests.support.process import printed_by

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def exact_keys(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """``[tokens, 128]``: E2M1 values with a 6 in every group of 16, which NVFP4 keeps as they are."""
    magnitudes = E2M1[torch.randint(8, (tokens, 8, 16), generator=generator)]
    magnitudes[:, :, 0] = 6.0
    signs = torch.randint(2, magnitudes.shape, generator=generator) * 2 - 1
    return (magnitudes * signs).reshape(tokens, 128)


def exact_queries(tokens: int, heads: int, generator: torch.Generator) -> torch.Tensor:
    """``[tokens, heads, 128]`` small integers."""
    return torch.randint(-4, 5, (tokens, heads, 128), generator=generator).float()


@pytest.mark.parametrize("heads", HEADS)
def test_scores_of_a_ragged_batch(heads: int) -> None:
    """Three requests: a chunk that ends inside a block, one token late in a context, a first chunk."""
    lengths, query_lens = (300, 641, 70), (45, 1, 70)
    results = []
    for backend in ("reference", "flydsl-sim"):
        generator = torch.Generator().manual_seed(heads)
        scorer = IndexScorer(
            IndexerConfig(
                num_index_heads=heads,
                num_pages=12,
                topk_blocks=4,
                local_blocks=0,
                backend=backend,
                device="cpu",
            )
        )
        sequences = [scorer.add_sequence() for _ in lengths]
        longest = max(lengths)
        for start in range(0, longest, 128):  # interleaved, so that pages are permuted
            for sequence, length in zip(sequences, lengths):
                if start < length:
                    scorer.append_keys(sequence, exact_keys(min(128, length - start), generator))
        q = exact_queries(sum(query_lens), heads, generator)
        results.append(scorer.score(q, sequences, query_lens=list(query_lens)))
        assert results[-1].backend == backend
    expected, found = results
    assert expected.scores is not None
    assert found.scores is not None
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.block_ids, expected.block_ids)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["code_8k_l20", "prose_8k_l10", "ragged_l15"])
def test_a_case_of_real_keys_verifies(name: str) -> None:
    """Every row's block ids are the expected ones, the scores within the contract's tolerance.

    ``tests/unit/test_verify.py`` has a shorter case.
    """
    path = DATA / f"{name}.safetensors"
    case = read_case(path if path.is_file() else more_case(name))
    verification = verify_case(case, name, "flydsl-sim")
    assert verification.ok, verification
    assert verification.topk_mismatches == 0
    assert verification.backend == "flydsl-sim"


def test_a_failing_launch_leaves_the_scorer_as_it_was() -> None:
    generator = torch.Generator().manual_seed(9)
    scorer = IndexScorer(
        IndexerConfig(num_index_heads=1, num_pages=2, local_blocks=0, backend="flydsl-sim", device="cpu")
    )
    sequence = scorer.add_sequence()
    scorer.append_keys(sequence, exact_keys(130, generator))
    q = exact_queries(3, 1, generator)
    before = scorer.score(q, [sequence])
    device = simulated_device()
    with (
        pytest.raises(LaunchError, match="hipModuleLaunchKernel returned hipErrorLaunchFailure"),
        device.failing("hipModuleLaunchKernel"),
    ):
        scorer.score(q, [sequence])
    after = scorer.score(q, [sequence])
    assert before.scores is not None
    assert after.scores is not None
    assert torch.equal(after.scores, before.scores)
    assert torch.equal(after.block_ids, before.block_ids)


def test_the_registry_says_what_was_found_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    status = registry.status("flydsl-sim")
    assert status.usable
    assert "disassembler" in status.reason
    assert registry.resolve("auto") != "flydsl-sim"
    monkeypatch.setattr(code_object, "_candidates", lambda: iter(()))
    status = registry.status("flydsl-sim")
    assert not status.usable
    assert status.reason.startswith("no disassembler for gfx950 was found; pip install rocm-llvm-python")
    with pytest.raises(DeviceUnavailableError, match="no disassembler"):
        simulated_device().check()


def test_another_device_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be 'cpu' for backend 'flydsl-sim'"):
        registry.create("flydsl-sim", "cuda")


# ---- The example of docs/gfx950-simulation.md runs as it stands ----


def test_the_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "gfx950-simulation.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = tmp_path / "example.py"  # a file: FlyDSL reads a kernel's source
    program.write_text(example)
    printed = printed_by(program, PYTHONPATH=str(ROOT))
    promised = re.search(r"print\(x\[:4\]\) +# (.*)", example)
    assert promised is not None
    assert printed.strip() == promised[1]
