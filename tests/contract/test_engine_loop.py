"""A small decode loop as an engine runs it, compared with the oracle layer by layer.

Two layers with pages of their own; chunked prefill, a shared prefix, speculative rows of which some are
rejected, and a decode batch padded to a fixed size. What a layer selects changes the next layer's keys and
queries, so a wrong block does not stay unseen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.plan import IndexPlan
from kernel.backends.base import Backend
from kernel.backends.reference import ReferenceBackend
from kernel.batch import Request, ScoreBatch
from kernel.nvfp4 import build_lut, quantize_query
from tests.support.cases import ROOT

LAYERS, HEADS, TOPK, PAGES, COLUMNS = 2, 2, 4, 96, 12
BATCH, DRAFTS = 4, 3
"""Requests of a captured decode step, padding included, and rows of each."""


@dataclass
class Generation:
    """A request: its tokens, as vectors, and its pages."""

    tokens: list[torch.Tensor]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class ToyEngine:
    """Schedules requests, owns pages and block tables, and runs two layers on the indexer."""

    def __init__(self, backend: Backend) -> None:
        self.device = backend.device
        self.scorer = IndexScorer(
            IndexerConfig(HEADS, 0, topk_blocks=TOPK, backend=backend.name, device=backend.device)
        )
        self.random = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(3, 128, 128, generator=self.random) / 11 for _ in range(LAYERS)]
        self.pages = [torch.zeros(PAGES, 9216, dtype=torch.uint8, device=self.device) for _ in range(LAYERS)]
        self.free = np.random.default_rng(0).permutation(PAGES).tolist()
        self.shared: dict[int, int] = {}
        self.block_table = torch.zeros(BATCH, COLUMNS, dtype=torch.int32, device=self.device)
        self.offsets = torch.zeros(BATCH + 1, dtype=torch.int32, device=self.device)
        self.seq_lens = torch.zeros(BATCH, dtype=torch.int32, device=self.device)
        self.captured = self.scorer.plan(
            self.block_table,
            cu_seqlens_q=self.offsets,
            seq_lens=self.seq_lens,
            max_query_len=DRAFTS,
            max_seq_len=COLUMNS * 128,
        )
        self.compared = 0

    def start(self, length: int, prefix: Generation | None = None) -> Generation:
        """A request of random tokens that may share the whole blocks of a computed one's prefix."""
        tokens = [torch.randn(128, generator=self.random) for _ in range(length)]
        if prefix is None:
            return Generation(tokens)
        blocks = prefix.computed // 128
        for page in prefix.pages[:blocks]:
            self.shared[page] = self.shared.get(page, 1) + 1
        return Generation(prefix.tokens[: blocks * 128] + tokens, blocks * 128, prefix.pages[:blocks])

    def step(self, work: list[tuple[Generation, int]], *, captured: bool = False) -> None:
        """Runs so many tokens of each request."""
        rows = [generation.tokens[generation.computed : generation.computed + n] for generation, n in work]
        slots = []
        for generation, n in work:
            end = generation.computed + n
            while len(generation.pages) * 128 < end:
                generation.pages.append(self.free.pop())
            slots += [generation.pages[t // 128] * 128 + t % 128 for t in range(generation.computed, end)]
            generation.computed = end
        hidden = torch.stack([row for some in rows for row in some])
        lens, keys = [n for _, n in work], [generation.computed for generation, _ in work]
        table = torch.full((len(work), COLUMNS), -1, dtype=torch.int32)
        for row, (generation, _) in zip(table, work):
            row[: len(generation.pages)] = torch.tensor(generation.pages)
        plan = self._captured(table, lens, keys) if captured else self._planned(table, lens, keys)
        for layer in range(LAYERS):
            hidden = self._layer(layer, hidden, torch.tensor(slots), plan, table, lens, keys)

    def reject(self, generation: Generation, count: int) -> None:
        """Forget the last computed tokens: their slots are written again."""
        del generation.tokens[len(generation.tokens) - count :]
        generation.computed -= count

    def _planned(self, table: torch.Tensor, lens: list[int], keys: list[int]) -> IndexPlan:
        return self.scorer.plan(table.to(self.device), query_lens=lens, seq_lens=keys)

    def _captured(self, table: torch.Tensor, lens: list[int], keys: list[int]) -> IndexPlan:
        """Writes the step into the buffers of the plan that is always the same; the rest is padding."""
        self.block_table[: len(lens)] = table.to(self.device)
        ends = np.cumsum([0, *lens, *[0] * (BATCH - len(lens))])
        self.offsets.copy_(torch.from_numpy(ends.astype(np.int32)))
        self.seq_lens.copy_(torch.tensor([*keys, *[0] * (BATCH - len(lens))]))
        return self.captured

    def _layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        plan: IndexPlan,
        table: torch.Tensor,
        lens: list[int],
        keys: list[int],
    ) -> torch.Tensor:
        to_key, to_query, to_value = self.weights[layer]
        queries = torch.zeros(plan.total_q, HEADS, 128)
        queries[: len(hidden)] = torch.stack([hidden @ to_query, hidden @ to_query.flip(0)], 1)
        self.scorer.insert((hidden @ to_key).to(self.device), self.pages[layer], slots.to(self.device))
        ids = plan.select(quantize_query(queries).to(self.device), self.pages[layer]).cpu()
        expected = self._oracle(layer, quantize_query(queries[: len(hidden)]), table, lens, keys)
        assert torch.equal(ids[:, : len(hidden)], expected)
        assert bool((ids[:, len(hidden) :] == -1).all())
        self.compared += len(hidden)
        chosen = (ids[:, : len(hidden)].float() + 1).mean((0, 2))[:, None]
        return torch.tanh(hidden @ to_value + 0.1 * chosen)

    def _oracle(
        self, layer: int, queries: torch.Tensor, table: torch.Tensor, lens: list[int], keys: list[int]
    ) -> torch.Tensor:
        starts = np.cumsum([0, *lens])
        requests = tuple(Request(row, int(starts[row]), n, k) for row, (n, k) in enumerate(zip(lens, keys)))
        batch = ScoreBatch(queries, self.pages[layer].cpu(), table, build_lut("cpu"), requests, 0, 1)
        expected = torch.full((HEADS, len(queries), TOPK), -1, dtype=torch.int32)
        ReferenceBackend().select(batch, expected, "score")
        return expected


def test_a_decode_loop_selects_what_the_oracle_selects(product_backend: Backend) -> None:
    engine = ToyEngine(product_backend)
    first = engine.start(900)
    for chunk in (256, 300, 344):  # chunked prefill, not at block boundaries
        engine.step([(first, chunk)])
    second = engine.start(40, prefix=first)  # shares seven blocks
    third = engine.start(130)
    assert second.pages == first.pages[:7]
    engine.step([(second, 40), (third, 130)])
    for number in range(4):
        for generation in (first, second, third):
            generation.tokens += [torch.randn(128, generator=engine.random) for _ in range(DRAFTS)]
        engine.step([(first, DRAFTS), (second, DRAFTS), (third, 1)], captured=True)
        engine.reject(first, number % DRAFTS)  # drafts that the model did not confirm
        engine.reject(second, 1)
        third.tokens = third.tokens[: third.computed]
    third.tokens.append(torch.randn(128, generator=engine.random))
    engine.step([(third, 1)], captured=True)  # two requests have ended: more padding
    assert engine.compared == LAYERS * (900 + 170 + 4 * (2 * DRAFTS + 1) + 1)


def test_blocks_of_the_guide_run() -> None:
    text = (ROOT / "docs/engine.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    exec(compile("\n".join(blocks), "docs/engine.md", "exec"), namespace)  # noqa: S102 - the point of the test
    assert tuple(namespace["block_ids"].shape) == (4, 3, 16)  # type: ignore[attr-defined]
    assert tuple(namespace["tables"].shape) == (2, 4)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_compiled_layer_gives_the_bits_of_an_eager_one(
    product_backend: Backend, dtype: torch.dtype
) -> None:
    """Insert and select under fullgraph=True, with the default compiler where it can run."""
    scorer = IndexScorer(
        IndexerConfig(HEADS, 0, topk_blocks=TOPK, backend=product_backend.name, device=product_backend.device)
    )
    device = product_backend.device
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(16, generator=generator).int().view(2, 8).to(device)
    plan = scorer.plan(table, query_lens=[3, 1], seq_lens=[1000, 700])

    def layer(
        hidden: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scorer.insert(hidden, pages, slots)
        queries = torch.stack((hidden, -hidden), 1).to(dtype)
        ids = plan.select(queries, pages)
        return ids, hidden.float() * 2 + ids.sum((0, 2))[:, None]  # a product's bits are the compiler's own

    hidden = torch.randn(4, 128, generator=generator).bfloat16().to(device)
    pages = torch.randint(0, 255, (16, 9216), dtype=torch.uint8, generator=generator)
    pages[:, 8192:] = 0x38
    slots = torch.tensor([5, 300, 1800, 129], device=device)
    results = []
    compiler = "inductor" if device.type == "cuda" else "aot_eager"
    for run in (layer, torch.compile(layer, fullgraph=True, backend=compiler)):
        own = pages.to(device)
        results.append((*run(hidden, own, slots), own))
    for eager, compiled in zip(*results):
        assert torch.equal(eager, compiled)
