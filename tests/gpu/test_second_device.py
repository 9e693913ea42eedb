"""A GPU that is not the current one: kernels are launched there, and the bytes are the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.case import encode_case
from indexer.replay import CaseScorer
from indexer.wire import decode_reply
from kernel.backends import registry
from kernel.backends.base import Precision
from kernel.errors import InvalidArgumentError
from tests.distributed.test_same_bytes import OPTIONS, values
from tests.gpu.test_plan_graphs import Captured, planned
from tests.http.test_ranks import pids
from tests.support import process_group
from tests.support.calls import STEPS, StepBuffers, random_call
from tests.support.compare import assert_same_bits, inserted, scores_of, selection_of, topk_of
from tests.support.http import assert_problem, binary, make_sequence, normals, random_case, sequences_body
from tests.support.live_server import LiveServer, until
from tests.support.process_group import Step

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend

END_SECONDS = 30
"""Time for a sidecar to end, on a busy machine."""
LENGTHS = [(4000, 700), (3000, 1), (2305, 16), (130, 129), (9000, 4)]


class Place(NamedTuple):
    """A GPU to run on, and another that is the current one meanwhile."""

    device: torch.device
    other: torch.device


@pytest.fixture(params=[(1, 0), (0, 1)], ids=["cuda:1 while cuda:0", "cuda:0 while cuda:1"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Fails at the end if a kernel was launched on the current GPU, or another became the current one."""
    status = registry.status("triton")
    if not status.usable:
        pytest.skip(f"backend triton: {status.reason}")
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one GPU")
    import triton

    index, current = request.param
    launched: list[int] = []

    def note(_: object) -> None:
        launched.append(torch.cuda.current_device())

    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        with torch.cuda.device(current):
            yield Place(torch.device("cuda", index), torch.device("cuda", current))
            assert torch.cuda.current_device() == current
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)
    assert set(launched) <= {index}


@pytest.fixture(params=["exact", "fast"])
def precision(request: pytest.FixtureRequest) -> Precision:
    """Both."""
    return cast("Precision", request.param)


def backend_on(place: Place, precision: Precision) -> TritonBackend:
    """The backend on the GPU that is not the current one."""
    return cast("TritonBackend", registry.create("triton", place.device, precision))


def test_every_operation_of_the_backend(place: Place, precision: Precision) -> None:
    backend = backend_on(place, precision)
    assert backend.device == place.device
    call = random_call(LENGTHS, 4, seed=31, values="inexact").forcing(1, 1)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1000, 128, generator=generator).to(torch.bfloat16)
    slots = torch.randperm(20 * 128, generator=generator)[:1000]
    pages = torch.zeros(20, 9216, dtype=torch.uint8)
    num_blocks = call.batch().num_blocks_per_query()

    def all_of_it() -> list[torch.Tensor]:
        scores = scores_of(backend, call)
        return [
            scores,
            topk_of(backend, scores, num_blocks, 16),
            selection_of(backend, call, 16),
            selection_of(backend, call, 5, "block"),
            inserted(backend, keys, pages, slots),
        ]

    found = all_of_it()
    with torch.cuda.device(place.device):
        expected = all_of_it()
    for mine, other in zip(found, expected):
        assert_same_bits(mine, other)


def test_a_scorer_and_its_cases(place: Place, precision: Precision) -> None:
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 5000, 128))]
    script += [Step("fork_sequence", (0,)), Step("append_keys", (1,), values(1, 700, 128))]
    for query_lens in ([300, 200], [1, 1], [16, 3]):
        queries = values(2, sum(query_lens), 4, 128)
        script += [
            Step("score", (0, 1), queries, {**options, "query_lens": query_lens}) for options in OPTIONS
        ]
    script.append(Step("free_sequence", (0,)))
    config = IndexerConfig(4, 100, local_blocks=0, backend="triton", device=place.device, precision=precision)
    scorer, case = IndexScorer(config), random_case(((3000, 20), (500, 1)))
    found, scored = process_group.played(scorer, script), CaseScorer(scorer).score(case)
    assert scored.scores is not None
    assert all(seconds >= 0 for seconds in dict(scored.timings).values())
    with torch.cuda.device(place.device):
        again = IndexScorer(config)
        process_group.assert_same_outcomes(found, process_group.played(again, script), str(place))
        expected = CaseScorer(again).score(case)
    assert expected.scores is not None
    assert_same_bits(scored.scores, expected.scores)
    assert_same_bits(scored.block_ids, expected.block_ids)


def test_a_captured_decode_step(place: Place, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first graph of the process was captured on the other GPU, where torch's own stream for
    captures then lies."""
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    number, first = torch.zeros(1, device=place.other), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        number.add_(1)
    backend = backend_on(place, precision)
    calls = [random_call(lengths, 2, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers = StepBuffers(calls, place.device)
    buffers.write(calls[0])
    plan = planned(backend, buffers)
    graph = Captured(lambda: plan.select(buffers.q, buffers.pages), device=place.device)
    for call in calls:
        buffers.write(call)
        ids = graph.replay()[0][:, : call.total_q].contiguous()
        with torch.cuda.device(place.device):
            assert_same_bits(ids, selection_of(backend, call, 16))


def test_tensors_on_the_other_gpu_are_refused_by_name(place: Place) -> None:
    scorer = IndexScorer(IndexerConfig(1, 8, backend="triton", device=place.device))
    seq = scorer.add_sequence()
    limit = f"must be {place.device}"
    with pytest.raises(InvalidArgumentError, match=rf"^k\.device = {place.other}: {limit}"):
        scorer.append_keys(seq, torch.zeros(3, 128, device=place.other))
    scorer.append_keys(seq, torch.zeros(300, 128, device=place.device))
    with pytest.raises(InvalidArgumentError, match=rf"^q\.device = {place.other}: {limit}"):
        scorer.score(torch.zeros(2, 1, 128, device=place.other), [seq])
    call = random_call([(300, 5)], 1)
    names = ("q", "pages", "block_table", "cu_seqlens_q", "seq_lens")
    here = {name: getattr(call, name).to(place.device) for name in names}
    here["scores"] = torch.zeros(1, 5, 3, device=place.device)
    scorer.score_paged(**here)
    for name, tensor in here.items():
        with pytest.raises(InvalidArgumentError, match=rf"^{name}\.device = {place.other}: {limit}"):
            scorer.score_paged(**{**here, name: tensor.to(place.other)})


def test_plans_and_runs_on_the_other_gpu_are_refused(place: Place) -> None:
    backend = backend_on(place, "exact")
    calls = [random_call([(300, 1)], 1)]
    here, there = StepBuffers(calls, place.device), StepBuffers(calls, place.other)
    plan = planned(backend, here)
    for name, arguments in (("q", (there.q, here.pages)), ("pages", (here.q, there.pages))):
        with pytest.raises(InvalidArgumentError, match=rf"^{name}\.device = {place.other}: must be"):
            plan.select(*arguments)
    for name in ("block_table", "cu_seqlens_q", "seq_lens"):
        mixed = StepBuffers(calls, place.device)
        setattr(mixed, name, getattr(there, name))
        with pytest.raises(InvalidArgumentError, match=rf"^{name}\.device = {place.other}: must be"):
            planned(backend, mixed)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("flags", ["--device=cuda:1", "--context-parallel=2"])
def test_a_sidecar_gives_the_bytes_of_one_scorer(flags: str) -> None:
    """Whose calls run on a thread, where the first GPU is the current one; or on a rank on each GPU."""
    if not registry.status("triton").usable or torch.cuda.device_count() < 2:
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs")
    single = IndexScorer(IndexerConfig(4, 200, local_blocks=0, backend="triton"))
    case, keys, query = random_case(((5000, 40), (300, 1))), normals(9000, 128), normals(700, 4, 128, seed=1)
    seq = single.add_sequence()
    single.append_keys(seq, torch.from_numpy(keys).cuda())
    want_case = CaseScorer(single).score(case)
    with LiveServer("--backend=triton", "--num-pages=200", "--local-blocks=0", flags) as live:
        with live.client() as client:
            assert client.get("/readyz").status_code == 200
            found = decode_reply(client.post("/v1/score?scores=true", **binary(encode_case(case))).content)
            assert want_case.scores is not None
            assert found.scores is not None
            assert found.block_ids.tobytes() == want_case.block_ids.cpu().numpy().tobytes()
            assert found.scores.tobytes() == want_case.scores.cpu().numpy().tobytes()
            there = make_sequence(client, keys)
            fork = client.post(f"/v1/sequences/{there}/fork").json()["id"]
            for rows in (slice(None), slice(0, 3)):
                for scores in (True, False):
                    own = np.ascontiguousarray(query[rows])
                    want = single.score(torch.from_numpy(own).cuda(), [seq], return_scores=scores, topk=5)
                    path = f"/v1/sequences/score?topk=5&scores={str(scores).lower()}"
                    found = decode_reply(client.post(path, **sequences_body(own, [fork])).content)
                    assert found.block_ids.tobytes() == want.block_ids.cpu().numpy().tobytes()
                    if want.scores is not None:
                        assert found.scores is not None
                        assert found.scores.tobytes() == want.scores.cpu().numpy().tobytes()
            assert client.delete(f"/v1/sequences/{there}").status_code == 204
        assert live.stop(END_SECONDS) == 0


@pytest.mark.timeout(240)
def test_a_sidecar_that_lost_a_rank_says_so_and_ends() -> None:
    if not registry.status("triton").usable or torch.cuda.device_count() < 2:
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs")
    with LiveServer("--backend=triton", "--num-pages=200", "--context-parallel=2") as live:
        (pid,) = pids(live).values()
        with live.client() as client:
            make_sequence(client, normals(900, 128))
            os.kill(pid, signal.SIGKILL)
            until(lambda: client.get("/readyz").status_code == 503)
            assert assert_problem(client.get("/readyz"), 503, "rank-lost")["ranks"] == [1]
            assert_problem(client.post("/v1/sequences"), 503, "rank-lost")
            assert client.get("/healthz").status_code == 200
        assert live.stop(END_SECONDS) == 0
