"""Captures of an engine's calls: what is kept, what is refused, and that the engine never notices."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from indexer import Recorder, capture
from indexer.case import Case, read_case
from indexer.recording.pages_in_use import wrapped_page_ids
from indexer.replay import load_case
from kernel.errors import InvalidArgumentError
from tests.support.call import Call
from tests.support.calls import RAGGED, random_call
from tests.support.sparse import sparse_bytes

TOPK = 5


def engine_call(call: Call, **changes: Any) -> dict[str, Any]:
    """The arguments of a capture."""
    arguments = {
        "index_q": call.q,
        "pages": call.pages,
        "block_table": call.block_table,
        "cu_seqlens_q": call.cu_seqlens_q,
        "seq_lens": call.seq_lens,
        "topk": TOPK,
        "local_blocks": 0,
    }
    return {**arguments, **changes}


def captured(path: Path, call: Call, **changes: Any) -> Case:
    capture(path, **engine_call(call, **changes))
    return read_case(path)


@pytest.mark.parametrize("page_stride", [9216, 9216 + 32])
def test_a_capture_scores_as_the_engine_does_and_holds_no_page_too_many(
    tmp_path: Path, page_stride: int
) -> None:
    call = random_call(page_stride=page_stride)
    case = captured(tmp_path / "c.safetensors", call)
    used = sum(-(-seq_len // 128) for seq_len, query_len in RAGGED if query_len)
    assert case.pages is not None
    assert case.engine is not None
    assert case.engine.page_ids is not None
    assert case.pages.shape == (used, 9216)
    assert case.engine.page_stride == page_stride
    np.testing.assert_array_equal(case.pages, call.pages.numpy()[case.engine.page_ids])

    batch = call.batch()
    scores = torch.full((call.num_heads, call.total_q, batch.num_score_blocks), -torch.inf)
    from kernel.backends.reference import ReferenceBackend

    ReferenceBackend().score_prefill(batch, scores)
    again = load_case(case, "reference").score().scores
    assert again is not None
    torch.testing.assert_close(again, scores, rtol=0, atol=0)


def test_results_padding_and_layer_are_kept(tmp_path: Path) -> None:
    """The engine's buffers are longer than the call, as a graph's are, and token-major."""
    call = random_call([(300, 5), (129, 2)], heads=2)
    padded = {
        "index_q": torch.cat([call.q.view(torch.uint8), torch.zeros(3, 2, 128, dtype=torch.uint8)]).view(
            torch.float8_e4m3fn
        ),
        "seq_lens": torch.cat([call.seq_lens, torch.tensor([7, 7], dtype=torch.int32)]).long(),
        "block_table": torch.nn.functional.pad(call.block_table, (0, 0, 0, 2), value=-1).long(),
        "block_ids": torch.arange(10 * 2 * TOPK, dtype=torch.int64).view(10, 2, TOPK).transpose(0, 1),
        "scores": torch.arange(10 * 2 * 3, dtype=torch.float16).view(10, 2, 3).transpose(0, 1),
        "new_keys": torch.ones(10, 128, dtype=torch.bfloat16),
        "layer": 7,
        "order": "block",
    }
    case = captured(tmp_path / "c.safetensors", call, **padded)
    record = case.engine
    assert record is not None
    assert (case.total_q, record.layer, record.order) == (7, 7, "block")
    assert record.block_ids is not None
    assert record.scores is not None
    assert record.new_keys is not None
    assert record.block_ids[:, :, 0].tolist() == [
        [10 * t for t in range(7)],
        [10 * t + 5 for t in range(7)],
    ]
    assert record.scores[1, 6].tolist() == [39, 40, 41]
    assert record.new_keys.shape == (7, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_cache_of_plain_keys_becomes_keys(tmp_path: Path, dtype: torch.dtype) -> None:
    call = random_call([(300, 5), (0, 0), (129, 2)], heads=1)
    cache = torch.randn(len(call.pages), 128, 128).to(dtype)
    case = captured(tmp_path / "c.safetensors", call, pages=cache)
    assert case.index_k is not None
    table = call.block_table
    wanted = torch.cat(
        [cache[table[0, :3]].float().view(-1, 128)[:300], cache[table[2, :2]].float().view(-1, 128)[:129]]
    )
    np.testing.assert_array_equal(case.index_k.astype(np.float32), wanted.numpy())


def test_pages_that_offsets_of_32_bits_would_read_are_kept_on_request(tmp_path: Path) -> None:
    num_pages = (1 << 32) // 9216 + 20
    pages = sparse_bytes(num_pages * 9216, torch.device("cpu")).view(num_pages, 9216)
    high, middle = num_pages - 1, (1 << 31) // 9216 + 3
    table = torch.tensor([[high, 5, middle]])
    arguments: dict[str, Any] = {
        "index_q": torch.zeros(1, 1, 128),
        "pages": pages,
        "block_table": table,
        "cu_seqlens_q": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([300]),
    }
    capture(tmp_path / "plain.safetensors", **arguments)
    plain = read_case(tmp_path / "plain.safetensors").engine
    assert plain is not None
    assert plain.page_ids is not None
    assert plain.page_ids.tolist() == [5, middle, high]
    capture(tmp_path / "all.safetensors", **arguments, wrapped_pages=True)
    record = read_case(tmp_path / "all.safetensors").engine
    assert record is not None
    assert record.page_ids is not None
    assert record.page_ids[:3].tolist() == [5, middle, high]
    for wrap in (1 << 31, 1 << 32):
        for page in (middle, high):
            if page * 9216 >= wrap:
                assert (page * 9216 % wrap) // 9216 in record.page_ids
    assert wrapped_page_ids(np.array([5]), 9216, num_pages).size == 0


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"max_bytes": 1000}, "max_bytes"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 3])}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([1, 5])}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 99])}, "cu_seqlens_q"),
        ({"block_table": torch.full((2, 3), 10**6)}, "block_table[0, 0]"),
        ({"block_table": torch.full((2, 3), -1)}, "block_table[0, 0]"),
        ({"block_table": torch.zeros(2, 1)}, "block_table.shape[1]"),
        ({"pages": torch.zeros(40, 9216, dtype=torch.int8)}, "pages.dtype"),
        ({"pages": torch.zeros(40, 127, 128)}, "pages.shape"),
        ({"pages": None}, "pages"),
        ({"index_q": torch.zeros(7, 1, 128, dtype=torch.int8)}, "index_q.dtype"),
        ({"block_ids": torch.zeros(1, 7, 3)}, "engine_block_ids.shape"),
        ({"scores": torch.zeros(1, 7, 1)}, "engine_scores.shape[2]"),
        ({"order": "best"}, "engine_order"),
        ({"topk": 65}, "topk"),
    ],
)
def test_what_a_case_cannot_hold_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], argument: str
) -> None:
    call = random_call([(300, 5), (129, 2)], heads=1)
    with pytest.raises(InvalidArgumentError) as error:
        capture(tmp_path / "c.safetensors", **engine_call(call, **changes))
    assert error.value.argument == argument
    assert list(tmp_path.iterdir()) == []
    told: list[Exception] = []
    with Recorder(tmp_path, on_error=told.append) as recorder:
        changes.pop("max_bytes", None)
        if changes:
            assert recorder.capture(**engine_call(call, **changes)) is False
    assert len(told) == (1 if changes else 0)
    assert list(tmp_path.iterdir()) == []


def test_every_nth_call_is_taken_until_there_are_enough(tmp_path: Path) -> None:
    call = random_call([(300, 5)], heads=1)
    with Recorder(tmp_path / "new" / "folder", every=3, max_count=2, strict=True) as recorder:
        taken = []
        for number in range(12):
            taken.append(recorder.capture(**engine_call(call, source=str(number), layer=number)))
            recorder.flush()
        assert taken == [number in (0, 3) for number in range(12)]
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [read_case(file).source for file in files] == ["0", "3"]
    assert files[1].name.endswith("-0001-layer3.safetensors")
    assert recorder.capture(**engine_call(call)) is False, "closed"


def test_what_is_written_is_the_call_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine overwrites its buffers at once; the writer is late."""
    call = random_call([(300, 5)], heads=1)
    first = call.pages.clone(), call.q.view(torch.uint8).clone()
    free = threading.Event()

    def late(case: Case, path: Path) -> None:
        free.wait(10)
        from indexer.case import write_case

        write_case(case, path)

    monkeypatch.setattr("indexer.recording.recorder.write_case", late)
    with Recorder(tmp_path, strict=True) as recorder:
        assert recorder.capture(**engine_call(call))
        call.pages.zero_()
        call.q.view(torch.uint8).zero_()
        assert recorder.capture(**engine_call(call))
        assert recorder.capture(**engine_call(call)) is False, "no third call is held in memory"
        free.set()
    case = read_case(min(tmp_path.iterdir()))
    assert case.pages is not None
    assert case.engine is not None
    assert case.engine.page_ids is not None
    np.testing.assert_array_equal(case.pages, first[0].numpy()[case.engine.page_ids])
    np.testing.assert_array_equal(case.index_q.view(np.uint8), first[1].numpy())


def test_errors_never_reach_an_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call([(300, 5)], heads=1)
    (tmp_path / "file").write_text("not a folder")

    def broken(error: Exception) -> None:
        raise RuntimeError("handler")

    for on_error in (None, broken):
        with Recorder(tmp_path / "file", on_error=on_error) as recorder:
            assert recorder.capture(**engine_call(call)) is True
            assert recorder.capture(**engine_call(call, pages="junk")) is False
    assert "a call was not captured" in caplog.text
    assert "the error handler of a recorder failed" in caplog.text
    recorder = Recorder(tmp_path / "file", strict=True)
    recorder.capture(**engine_call(call))
    with pytest.raises(OSError, match="file"):
        recorder.flush()
    with pytest.raises(InvalidArgumentError, match="pages"):
        recorder.capture(**engine_call(call, pages="junk"))
    recorder.close()


@pytest.mark.parametrize("name", ["every", "max_count", "max_bytes"])
def test_numbers_of_a_recorder_are_checked(tmp_path: Path, name: str) -> None:
    for value in (0, -1, True, 1.5, "3"):
        with pytest.raises(InvalidArgumentError, match=name):
            Recorder(tmp_path, **{name: value})  # type: ignore[arg-type]


def test_threads_take_each_sample_once(tmp_path: Path) -> None:
    call = random_call([(1, 1)], heads=1)
    with Recorder(tmp_path, every=5, max_count=1000, strict=True) as recorder:
        taken: list[bool] = []

        def run() -> None:
            for _ in range(50):
                taken.append(recorder.capture(**engine_call(call)))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 1 <= sum(taken) <= 40
    assert len(list(tmp_path.iterdir())) == sum(taken)


def test_a_call_that_is_not_sampled_costs_microseconds(tmp_path: Path) -> None:
    call = random_call([(300, 5)], heads=1)
    recorder = Recorder(tmp_path, every=10**9)
    recorder.capture(**engine_call(call))
    arguments = engine_call(call)
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            recorder.capture(**arguments)
        best = min(best, (time.perf_counter() - began) / 100)
    recorder.close()
    assert best < 100e-6
