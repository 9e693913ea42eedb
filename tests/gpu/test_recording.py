"""Captures of calls whose tensors lie on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from indexer import IndexerConfig, IndexScorer, Recorder, capture
from indexer.case import Case, read_case
from indexer.recording.snapshot import GATHER_BYTES
from indexer.replay import CaseScorer, load_case
from indexer.verify import verify_case
from kernel.errors import InvalidArgumentError
from tests.support.calls import PAGE, RAGGED, Call, random_call
from tests.support.compare import assert_same_bits

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend

TOPK = 5
CLOCKS = 1_000_000_000
"""Half a second and more of any GPU."""
NAMES = ("q", "pages", "block_table", "cu_seqlens_q", "seq_lens")


def on_gpu(call: Call, device: torch.device) -> dict[str, Any]:
    """The tensors of a call on a GPU, its pages as far apart as they were."""
    tensors = {name: getattr(call, name).to(device) for name in NAMES}
    pages = torch.empty_strided(call.pages.shape, call.pages.stride(), dtype=torch.uint8, device=device)
    return {**tensors, "pages": pages.copy_(call.pages)}


def arguments(tensors: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The arguments of a capture."""
    renamed = {"index_q" if name == "q" else name: tensor for name, tensor in tensors.items()}
    return {**renamed, "topk": TOPK, "local_blocks": 0, "order": "score", **changes}


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside the current one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def same_case(found: Case, expected: Case) -> None:
    """Fail unless two captures hold the same bytes."""
    for name in ("index_q", "pages", "block_table", "cu_seqlens_q", "seq_lens"):
        mine, other = getattr(found, name), getattr(expected, name)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
        assert mine.tobytes() == other.tobytes(), name
    assert found.engine is not None
    assert expected.engine is not None
    assert found.engine.page_stride == expected.engine.page_stride


@pytest.mark.parametrize("page_stride", [PAGE, 3 * PAGE])
def test_a_capture_replays_to_what_the_backend_gave(
    tmp_path: Path, gpu_backend: TritonBackend, page_stride: int
) -> None:
    call = random_call(RAGGED, 4, seed=5, page_stride=page_stride)
    there, precision = on_gpu(call, gpu_backend.device), gpu_backend.precision
    config = IndexerConfig(
        4, 0, topk_blocks=TOPK, local_blocks=0, backend="triton", device="cuda", precision=precision
    )
    result = IndexScorer(config).score_paged(**there)
    capture(
        tmp_path / "gpu.safetensors",
        **arguments(there, scores=result.scores, block_ids=result.block_ids),
    )
    capture(tmp_path / "host.safetensors", **arguments({name: getattr(call, name) for name in NAMES}))
    case = read_case(tmp_path / "gpu.safetensors")
    same_case(case, read_case(tmp_path / "host.safetensors"))
    assert case.engine is not None
    assert case.engine.scores is not None
    assert case.engine.block_ids is not None
    assert result.scores is not None
    scores = result.scores.cpu()
    blocks = case.engine.scores.shape[2]
    assert case.engine.scores.tobytes() == scores[..., :blocks].contiguous().numpy().tobytes()
    assert case.engine.block_ids.tobytes() == result.block_ids.cpu().numpy().tobytes()
    for replayed in (
        load_case(case, "triton", precision=precision).score(),
        CaseScorer(IndexScorer(config)).score(case),
    ):
        assert replayed.scores is not None
        assert_same_bits(replayed.scores.cpu(), scores)
        assert_same_bits(replayed.block_ids.cpu(), result.block_ids.cpu())
    assert verify_case(case, "gpu", "triton", precision=precision).backend_ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_caches_that_are_not_quantised(
    tmp_path: Path, gpu_backend: TritonBackend, dtype: torch.dtype
) -> None:
    call = random_call([(300, 5), (129, 1)], heads=1)
    pages = torch.randn(call.pages.shape[0], 128, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
    queries = call.q.to(torch.bfloat16)
    files = []
    for device in (torch.device("cpu"), gpu_backend.device):
        tensors = {name: getattr(call, name).to(device) for name in NAMES}
        tensors.update(pages=pages.to(device), q=queries.to(device))
        files.append(tmp_path / f"{device.type}.safetensors")
        capture(files[-1], **arguments(tensors))
    on_host, there = map(read_case, files)
    assert on_host.index_k is not None
    assert there.index_k is not None
    assert there.index_k.tobytes() == on_host.index_k.tobytes()
    assert there.index_q.tobytes() == on_host.index_q.tobytes()


def test_a_call_in_a_side_stream(tmp_path: Path, gpu_backend: TritonBackend) -> None:
    """The stream is late: it writes the call's tensors only after a while, and over them afterwards."""
    call, other = random_call(RAGGED, 2, seed=6), random_call(RAGGED, 2, seed=7)
    late, device = on_gpu(call, gpu_backend.device), gpu_backend.device
    tensors = on_gpu(other, device)
    torch.cuda.synchronize()
    stream = new_stream(device)
    with Recorder(tmp_path, strict=True) as recorder, torch.cuda.stream(stream):
        torch.cuda._sleep(CLOCKS)  # type: ignore[no-untyped-call]
        for name, tensor in tensors.items():
            tensor.view(torch.uint8).copy_(late[name].view(torch.uint8))
        assert recorder.capture(**arguments(tensors))
        for tensor in tensors.values():
            tensor.view(torch.uint8).fill_(0xA5)
    (file,) = tmp_path.iterdir()
    host = tmp_path / "host.safetensors"
    capture(host, **arguments({name: getattr(call, name) for name in NAMES}))
    same_case(read_case(file), read_case(host))


def test_a_capture_waits_for_no_other_stream(tmp_path: Path, gpu_backend: TritonBackend) -> None:
    tensors = on_gpu(random_call(RAGGED, 2, seed=6), gpu_backend.device)
    capture(tmp_path / "before.safetensors", **arguments(tensors))
    torch.cuda.synchronize()
    busy = new_stream(gpu_backend.device)
    with torch.cuda.stream(busy):
        torch.cuda._sleep(10 * CLOCKS)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(new_stream(gpu_backend.device)):
        capture(tmp_path / "c.safetensors", **arguments(tensors))
    assert not busy.query(), "the other stream is still at work"
    busy.synchronize()


def test_pages_are_gathered_a_little_at_a_time(tmp_path: Path, gpu_backend: TritonBackend) -> None:
    """190 MiB of pages take 64 MiB of the GPU's memory."""
    pages = torch.randint(0, 256, (22_000, PAGE), dtype=torch.uint8, device=gpu_backend.device)
    ids = torch.randperm(22_000, device=gpu_backend.device)[:21_000].to(torch.int32).reshape(3, 7000)
    tensors = {
        "q": torch.zeros(3, 1, 128, device=gpu_backend.device),
        "pages": pages,
        "block_table": ids,
        "cu_seqlens_q": torch.arange(4, dtype=torch.int32, device=gpu_backend.device),
        "seq_lens": torch.full((3,), 7000 * 128, dtype=torch.int32, device=gpu_backend.device),
    }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    capture(tmp_path / "c.safetensors", **arguments(tensors))
    assert torch.cuda.max_memory_allocated() - before < GATHER_BYTES + (2 << 20)
    case = read_case(tmp_path / "c.safetensors")
    assert case.pages is not None
    assert case.block_table is not None
    for row, column in ((0, 0), (1, 6999), (2, 3500)):
        page = pages[int(ids[row, column])].cpu().numpy()
        np.testing.assert_array_equal(case.pages[case.block_table[row, column]].reshape(-1), page)


@pytest.mark.parametrize("gpu", [0, 1])
def test_a_call_within_a_graph_is_refused_and_the_graph_is_whole(
    tmp_path: Path, gpu_backend: TritonBackend, gpu: int
) -> None:
    """Whether the graph is recorded on the current GPU or on another."""
    if gpu >= torch.cuda.device_count():
        pytest.skip("torch sees one GPU")
    device = torch.device("cuda", gpu)
    tensors = on_gpu(random_call(RAGGED, 1, seed=8), device)
    number = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    refused: list[Exception] = []
    with Recorder(tmp_path, on_error=refused.append) as recorder:
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=new_stream(device)), torch.cuda.device(0):
            number.add_(1)
            with pytest.raises(InvalidArgumentError, match="stream = is recording a graph"):
                capture(tmp_path / "c.safetensors", **arguments(tensors))
            assert recorder.capture(**arguments(tensors)) is False
            number.add_(2)
        assert [getattr(error, "argument", None) for error in refused] == ["stream"]
        assert list(tmp_path.iterdir()) == []
        for _ in range(3):
            graph.replay()
        assert number.item() == 9
        assert recorder.capture(**arguments(tensors)), "the next call that runs eagerly is captured"
