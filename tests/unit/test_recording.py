"""Captures of an engine's calls: what is kept, what is refused, and that the engine never notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from indexer import Recorder, capture
from indexer.case import Case, read_case
from indexer.recording.snapshot import wrapped_page_ids
from indexer.replay import load_case
from kernel.errors import InvalidArgumentError
from tests.support.calls import RAGGED, Call, random_call, sparse_bytes

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


Q = torch.zeros(7, 1, 128)
WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"index_q": None}, "index_q"),
    ({"index_q": [[[0.0] * 128]] * 7}, "index_q"),
    ({"index_q": Q[:, 0]}, "index_q.shape"),
    ({"index_q": Q[..., :64]}, "index_q.shape"),
    ({"index_q": Q.expand(7, 3, 128)}, "index_q.shape[1]"),
    ({"index_q": Q.to("meta")}, "index_q.device"),
    ({"index_q": Q.to_sparse()}, "index_q.layout"),
    ({"index_q": Q.double()}, "index_q.dtype"),
    ({"pages": [[0] * 9216]}, "pages"),
    ({"pages": torch.zeros(9216, dtype=torch.uint8)}, "pages.shape"),
    ({"pages": torch.zeros(40, 9216, dtype=torch.uint8).T}, "pages.shape"),
    ({"pages": torch.zeros(40, 9216, 2, dtype=torch.uint8)[..., 0]}, "pages.stride()"),
    ({"pages": torch.zeros(40, 128, 128, device="meta")}, "pages.device"),
    ({"pages": torch.tensor(1.0)}, "pages.shape"),
    ({"block_table": torch.zeros(2, 3)}, "block_table.dtype"),
    ({"block_table": torch.zeros(2, 3, dtype=torch.bool)}, "block_table.dtype"),
    ({"block_table": torch.zeros(6, dtype=torch.int32)}, "block_table.shape"),
    ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "block_table.shape[0]"),
    ({"block_table": [[0, 1, 2], [3]]}, "block_table"),
    ({"block_table": [[0.0, 1.0, 2.0]] * 2}, "block_table"),
    ({"block_table": None}, "block_table"),
    ({"block_table": torch.full((2, 3), 1 << 32)}, "block_table[0, 0]"),
    ({"cu_seqlens_q": torch.tensor([[0, 5]])}, "cu_seqlens_q.shape"),
    ({"cu_seqlens_q": torch.tensor(0)}, "cu_seqlens_q.shape"),
    ({"cu_seqlens_q": torch.tensor([0.0, 5.0, 7.0])}, "cu_seqlens_q.dtype"),
    ({"cu_seqlens_q": torch.tensor([], dtype=torch.int32)}, "cu_seqlens_q"),
    ({"cu_seqlens_q": []}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0, "5", 7]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0, None, 7]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0, 1 << 70]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0, 1 << 40]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": {0: 5}}, "cu_seqlens_q"),
    ({"seq_lens": torch.tensor(300)}, "seq_lens.shape"),
    ({"seq_lens": torch.tensor([300])}, "seq_lens.shape[0]"),
    ({"seq_lens": [True, False]}, "seq_lens"),
    ({"seq_lens": torch.tensor([4, 129])}, "seq_lens[0]"),
    ({"seq_lens": torch.tensor([-1, 129])}, "seq_lens[0]"),
    ({"seq_lens": torch.tensor([(1 << 32) + 300, 129])}, "seq_lens[0]"),
    ({"seq_lens": torch.tensor([0, 129])}, "seq_lens[0]"),
    ({"seq_lens": torch.tensor([0, 0])}, "seq_lens"),
    ({"scores": torch.zeros(2, 7, 3)}, "scores.shape"),
    ({"scores": torch.zeros(1, 6, 3)}, "scores.shape[1]"),
    ({"scores": torch.zeros(1, 7, 3, dtype=torch.int32)}, "scores.dtype"),
    ({"scores": [[[0.0]]]}, "scores"),
    ({"block_ids": torch.zeros(1, 7, TOPK)}, "block_ids.dtype"),
    ({"block_ids": torch.zeros(1, 6, TOPK, dtype=torch.int32)}, "block_ids.shape[1]"),
    ({"block_ids": torch.full((1, 7, TOPK), 1 << 32)}, "block_ids[0, 0, 0]"),
    ({"new_keys": torch.zeros(6, 128)}, "new_keys.shape[0]"),
    ({"new_keys": torch.zeros(7, 64)}, "new_keys.shape"),
    ({"new_keys": torch.zeros(7, 128, dtype=torch.uint8)}, "new_keys.dtype"),
    ({"topk": "16"}, "topk"),
    ({"topk": torch.tensor(5)}, "topk"),
    ({"init_blocks": -1}, "init_blocks"),
    ({"init_blocks": 1.0}, "init_blocks"),
    ({"local_blocks": None}, "local_blocks"),
    ({"local_blocks": 10**9}, "local_blocks"),
    ({"order": None}, "order"),
    ({"layer": "7"}, "layer"),
    ({"layer": -1}, "layer"),
    ({"source": None}, "source"),
    ({"source": b"x"}, "source"),
    ({"wrapped_pages": 1}, "wrapped_pages"),
]
"""What an engine, or a hand, may pass in place of an argument, and the argument that the error names."""


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

    ReferenceBackend().score(batch, scores)
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
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table.shape[1]"),
        ({"pages": torch.zeros(40, 9216, dtype=torch.int8)}, "pages.dtype"),
        ({"pages": torch.zeros(40, 127, 128)}, "pages.shape"),
        ({"pages": None}, "pages"),
        ({"index_q": torch.zeros(7, 1, 128, dtype=torch.int8)}, "index_q.dtype"),
        ({"block_ids": torch.zeros(1, 7, 3, dtype=torch.int64)}, "block_ids.shape"),
        ({"scores": torch.zeros(1, 7, 1)}, "scores.shape[2]"),
        ({"order": "best"}, "order"),
        ({"topk": 65}, "topk"),
        ({"seq_lens": np.ma.array([300, 129], mask=[True, False])}, "seq_lens"),
        *WRONG_TYPES,
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


@pytest.mark.parametrize(
    ("changes", "argument"), [({"max_bytes": 0}, "max_bytes"), ({"max_bytes": 1e9}, "max_bytes")]
)
def test_a_limit_is_a_number_of_bytes(tmp_path: Path, changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        capture(tmp_path / "c", **engine_call(random_call([(300, 5)], heads=1), **changes))
    assert error.value.argument == argument


@pytest.mark.parametrize("path", [None, 3, b"c", ["c"]])
def test_a_path_is_text(path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="path"):
        capture(path, **engine_call(random_call([(300, 5)], heads=1)))
    with pytest.raises(InvalidArgumentError, match="folder"):
        Recorder(path)


def test_a_folder_is_made_for_a_file_and_not_for_a_refusal(tmp_path: Path) -> None:
    call = random_call([(300, 5)], heads=1)
    with pytest.raises(InvalidArgumentError):
        capture(tmp_path / "new" / "c.safetensors", **engine_call(call, topk=0))
    assert list(tmp_path.iterdir()) == []
    capture(tmp_path / "new" / "c.safetensors", **engine_call(call))
    assert read_case(tmp_path / "new" / "c.safetensors").total_q == 5


def test_lengths_and_tables_that_an_engine_keeps_on_the_host(tmp_path: Path) -> None:
    """Lists of Python's and arrays of numpy's give the file that tensors give."""
    call = random_call([(300, 5), (129, 2)], heads=1)
    capture(tmp_path / "tensors", **engine_call(call))
    names = ("block_table", "cu_seqlens_q", "seq_lens")
    changes: list[dict[str, Any]] = [
        {name: getattr(call, name).tolist() for name in names},
        {
            name: tuple(map(tuple, t.tolist())) if (t := getattr(call, name)).dim() > 1 else tuple(t.tolist())
            for name in names
        },
        {name: getattr(call, name).numpy().astype(np.uint16) for name in names},
        {name: getattr(call, name).long() for name in names},
    ]
    for change in changes:
        capture(tmp_path / "other", **engine_call(call, **change))
        assert (tmp_path / "other").read_bytes() == (tmp_path / "tensors").read_bytes()


def test_any_strides_and_gradients_are_read_right(tmp_path: Path) -> None:
    """Head-major queries, a table that is a slice, keys whose pages are a transposed view."""
    call = random_call([(300, 5), (129, 2)], heads=2)
    queries = torch.randn(7, 2, 128, requires_grad=True)
    keys = torch.randn(128, len(call.pages), 128).transpose(0, 1)
    wide = torch.nn.functional.pad(call.block_table, (0, 5), value=-7)
    plain = captured(tmp_path / "a", call, index_q=queries, pages=keys.contiguous())
    case = captured(
        tmp_path / "b",
        call,
        index_q=queries.detach().transpose(0, 1).contiguous().transpose(0, 1),
        pages=keys.requires_grad_(),
        block_table=wide[:, : call.block_table.shape[1]],
    )
    assert case.index_k is not None
    assert plain.index_k is not None
    np.testing.assert_array_equal(case.index_q, plain.index_q)
    np.testing.assert_array_equal(case.index_k, plain.index_k)


def test_pages_are_gathered_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU without room for all of them can still serve."""
    call = random_call()
    capture(tmp_path / "a", **engine_call(call))
    taken = []
    select = torch.Tensor.index_select

    def counted(pages: torch.Tensor, axis: int, ids: torch.Tensor) -> torch.Tensor:
        taken.append(len(ids) * pages.shape[1])
        return select(pages, axis, ids)

    monkeypatch.setattr(torch.Tensor, "index_select", counted)
    monkeypatch.setattr("indexer.recording.snapshot.GATHER_BYTES", 3 * 9216)
    capture(tmp_path / "b", **engine_call(call))
    assert max(taken) == 3 * 9216
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_padded_requests_of_a_graph_are_left_out(tmp_path: Path) -> None:
    """A decode batch padded to six rows: the last ones have a query and no keys, and a table of anything."""
    call = random_call([(300, 1), (129, 1)], heads=1)
    plain = captured(tmp_path / "a", call)
    padded = captured(
        tmp_path / "b",
        call,
        index_q=torch.cat([call.q.float(), torch.full((4, 1, 128), torch.nan)]).to(torch.float8_e4m3fn),
        cu_seqlens_q=torch.arange(7),
        seq_lens=torch.nn.functional.pad(call.seq_lens, (0, 4)),
        block_table=torch.nn.functional.pad(call.block_table, (0, 0, 0, 4), value=10**6),
        block_ids=torch.zeros(1, 6, TOPK, dtype=torch.int32),
    )
    assert (padded.batch, padded.total_q) == (2, 2)
    np.testing.assert_array_equal(padded.index_q.view(np.uint8), plain.index_q.view(np.uint8))
    assert padded.engine is not None
    assert padded.engine.block_ids is not None
    assert padded.engine.block_ids.shape == (1, 2, TOPK)


class OnGpu(torch.Tensor):
    """A tensor of the host that says it lies on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["index_q", "pages", "block_table", "seq_lens", "block_ids"])
def test_a_stream_that_records_a_graph_is_never_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The stream of the GPU that a tensor lies on, whichever is the current one."""
    call = random_call([(300, 5)], heads=1)
    arguments = engine_call(call, block_ids=torch.zeros(1, 5, TOPK, dtype=torch.int32))
    arguments[name] = arguments[name].as_subclass(OnGpu)
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(other: torch.device) -> Iterator[None]:
        current.append(other)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == 1)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("copied to the host"))
    with pytest.raises(InvalidArgumentError, match=r"stream = is recording a graph: .*eagerly"):
        capture(tmp_path / "c.safetensors", **arguments)
    with Recorder(tmp_path / "folder") as recorder:
        assert [recorder.capture(**arguments) for _ in range(3)] == [False] * 3
    assert caplog.text.count("is recording a graph") == 1
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


def test_what_is_refused_at_every_call_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = random_call([(300, 5)], heads=1)
    with Recorder(tmp_path) as recorder:
        for column in (0, 1, 2):
            table = call.block_table.clone()
            table[0, column] = 10**6
            assert recorder.capture(**engine_call(call, block_table=table)) is False
        assert recorder.capture(**engine_call(call, seq_lens=[1])) is False
        assert recorder.capture(**engine_call(call)) is True, "the next right call is taken"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3, messages
    assert messages[0].startswith("a call was not captured: block_table[0, 0] = 1000000: must lie in [0, ")
    assert messages[1].startswith("a call was not captured: seq_lens[0] = 1: ")
    assert messages[2].startswith("2 more calls were not captured")


def test_a_call_that_is_interrupted_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call([(300, 5)], heads=1)

    def interrupted(*_: object, **__: object) -> Case:
        raise KeyboardInterrupt

    with Recorder(tmp_path, max_count=3) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr("indexer.recording.recorder.snapshot", interrupted)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    recorder.capture(**engine_call(call))
        assert recorder.capture(**engine_call(call)) is True


@pytest.mark.parametrize(("name", "value"), [("strict", 1), ("on_error", "log")])
def test_switches_of_a_recorder_are_checked(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        Recorder(tmp_path, **{name: value})


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
