"""A random mix of calls over HTTP leaves what the same calls leave in an in-process scorer, bit for bit."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from indexer import IndexerConfig, IndexScorer, OutOfPagesError
from indexer.replay import as_tensor
from indexer.wire import decode_reply, encode_keys
from tests.http.conftest import NUM_PAGES
from tests.support.http_calls import binary, make_sequence, sequences_body

HEADS = 4


class Mirror:
    """The same sequences here and there."""

    def __init__(self, client: httpx.Client, seed: int) -> None:
        self.client = client
        self.random = np.random.default_rng(seed)
        self.scorer = IndexScorer(IndexerConfig(num_index_heads=HEADS, num_pages=NUM_PAGES, backend="cpu"))
        self.pairs: list[tuple[int, str]] = []

    def step(self) -> str:
        """One random call on both sides."""
        choice = str(self.random.choice(["add", "append", "append", "fork", "score", "score", "free"]))
        if not self.pairs:
            choice = "add"
        getattr(self, f"_{choice}")()
        used = NUM_PAGES - self.scorer.num_free_pages
        cache = self.client.get("/v1/cache").json()
        assert cache["used_pages"] == used
        lengths = {sequence["id"]: sequence["length"] for sequence in cache["sequences"]}
        assert lengths == {there: self.scorer.sequence_length(here) for here, there in self.pairs}
        return choice

    def _pick(self) -> int:
        return int(self.random.integers(len(self.pairs)))

    def _add(self) -> None:
        if len(self.pairs) < 8:
            self.pairs.append((self.scorer.add_sequence(), make_sequence(self.client)))

    def _append(self) -> None:
        here, there = self.pairs[self._pick()]
        tokens = int(self.random.choice([0, 1, 5, 127, 128, 300, 2500]))
        keys = self.random.standard_normal((tokens, 128)).astype(str(self.random.choice(["f4", "f2"])))
        if tokens and self.random.random() < 0.15:
            keys[-1, 3] = np.nan
        reply = self.client.post(f"/v1/sequences/{there}/keys", **binary(encode_keys(keys)))
        failed: Exception | None = None
        try:
            self.scorer.append_keys(here, as_tensor(keys))
        except (OutOfPagesError, ValueError) as error:
            failed = error
        if failed is None:
            assert reply.json()["length"] == self.scorer.sequence_length(here)
        elif isinstance(failed, OutOfPagesError):
            assert reply.status_code == 409
            assert reply.json()["missing_pages"] == failed.missing
        else:
            assert reply.status_code == 422

    def _fork(self) -> None:
        if len(self.pairs) < 8:
            here, there = self.pairs[self._pick()]
            fork = self.client.post(f"/v1/sequences/{there}/fork").json()["id"]
            self.pairs.append((self.scorer.fork_sequence(here), fork))

    def _free(self) -> None:
        here, there = self.pairs.pop(self._pick())
        self.scorer.free_sequence(here)
        assert self.client.delete(f"/v1/sequences/{there}").status_code == 204

    def _score(self) -> None:
        picked = [self.pairs[self._pick()] for _ in range(int(self.random.integers(1, 4)))]
        lens = [min(int(self.random.integers(0, 40)), self.scorer.sequence_length(h)) for h, _ in picked]
        query = self.random.standard_normal((sum(lens), HEADS, 128), dtype=np.float32)
        topk, local = int(self.random.integers(1, 20)), int(self.random.integers(0, 3))
        want = self.scorer.score(
            as_tensor(query), [here for here, _ in picked], lens, topk=topk, local_blocks=local
        )
        reply = self.client.post(
            f"/v1/sequences/score?topk={topk}&local_blocks={local}",
            **sequences_body(query, [there for _, there in picked], lens),
        )
        assert reply.status_code == 200, reply.text
        found = decode_reply(reply.content)
        assert want.scores is not None
        assert found.scores is not None
        assert found.scores.tobytes() == want.scores.numpy().tobytes()
        assert found.block_ids.tobytes() == want.block_ids.numpy().tobytes()

    def clear(self) -> None:
        """Drop everything."""
        while self.pairs:
            self._free()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_random_mix_of_calls(client: httpx.Client, seed: int) -> None:
    mirror = Mirror(client, seed)
    taken = [mirror.step() for _ in range(60)]
    mirror.clear()
    assert {"append", "fork", "score", "free"} <= set(taken)
    assert client.get("/v1/cache").json()["used_pages"] == 0
