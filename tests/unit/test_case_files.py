"""Case files that are right: round trips, views without copies, files on disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from indexer.case import Case, decode_case, encode_case, read_case, write_case
from indexer.case.codec import OPTIONAL_TENSORS, REQUIRED_TENSORS
from indexer.case.container import MAX_HEADER_BYTES
from kernel.errors import CaseFileError, IndexerError, InvalidArgumentError
from tests.support.cases import DATA, ROOT, edit, join, paged_case, small_case, small_parts, split
from tests.support.process import printed_by

FIELDS = ("init_blocks", "local_blocks", "topk", "source")
KEY_DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)
QUERY_DTYPES = (*KEY_DTYPES, ml_dtypes.float8_e4m3fn)


def assert_equal(got: Case, want: Case) -> None:
    for name in FIELDS:
        assert getattr(got, name) == getattr(want, name)
    for name in REQUIRED_TENSORS + OPTIONAL_TENSORS:
        array, wanted = getattr(got, name), getattr(want, name)
        if wanted is None:
            assert array is None
            continue
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert array.tobytes() == wanted.tobytes(), name


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any legal small case, in either form, with or without expected outputs."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    requests = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 6)), max_size=4))
    query_lens = [queries for _, queries in requests]
    seq_lens = [keys + queries for keys, queries in requests]
    heads, topk = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 64))
    total_q, total_k = sum(query_lens), sum(seq_lens)
    blocks = max((-(-n // 128) for n, q in zip(seq_lens, query_lens) if q), default=0)
    fields: dict[str, Any] = {
        "index_q": generator.normal(size=(total_q, heads, 128)).astype(draw(st.sampled_from(QUERY_DTYPES))),
        "cu_seqlens_q": np.cumsum([0, *query_lens], dtype=np.int32),
        "seq_lens": np.array(seq_lens, dtype=np.int32),
        "init_blocks": draw(st.integers(0, 10**9 - 1)),
        "local_blocks": draw(st.integers(0, 3)),
        "topk": topk,
        "source": draw(st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)),
    }
    if draw(st.booleans()):
        fields["index_k"] = generator.normal(size=(total_k, 128)).astype(draw(st.sampled_from(KEY_DTYPES)))
    else:
        shape = draw(st.sampled_from(((9216,), (128, 72))))
        fields["pages"] = generator.integers(0, 256, size=(3, *shape), dtype=np.uint8)
        width = blocks + draw(st.integers(0, 2))
        fields["block_table"] = generator.integers(0, 3, size=(len(requests), width), dtype=np.int32)
    if draw(st.booleans()):
        fields["expected_scores"] = generator.normal(size=(heads, total_q, blocks)).astype(np.float32)
    if draw(st.booleans()):
        fields["expected_block_ids"] = generator.integers(-1, 9, size=(heads, total_q, topk), dtype=np.int32)
    return Case(**fields)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_case_survives_the_round_trip(case: Case) -> None:
    body = encode_case(case)
    assert_equal(decode_case(body), case)
    for name, tensor in load(body).items():
        array = getattr(case, name)
        assert tuple(tensor.shape) == array.shape
        assert tensor.flatten().view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_same_case_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    write_case(small_case(), path)
    program = (
        "import sys; from indexer.case import encode_case; from tests.support.cases import small_case; "
        "sys.stdout.buffer.write(encode_case(small_case()))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout == path.read_bytes()


def test_body_is_viewed_and_not_copied() -> None:
    body = encode_case(small_case())
    case = decode_case(body)
    whole = np.frombuffer(body, dtype=np.uint8)
    for array in (case.index_q, case.index_k, case.seq_lens):
        assert array is not None
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_read(kind: Any) -> None:
    assert_equal(decode_case(kind(encode_case(paged_case()))), paged_case())


def test_file_is_mapped_and_writing_to_arrays_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    write_case(small_case(), path)
    before = path.read_bytes()
    case = read_case(path)
    assert case.index_k is not None
    case.index_k[:] = 0
    assert path.read_bytes() == before


def test_written_file_has_the_usual_permissions_and_no_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    umask = os.umask(0o027)
    try:
        write_case(small_case(), path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "call.safetensors"
    write_case(small_case(), path)
    before = path.read_bytes()

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_case(small_case(seed=1), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["missing", "directory", "empty", "pipe", "null byte", "device"])
def test_path_that_is_no_case_file_is_refused(kind: str, tmp_path: Path) -> None:
    path: str | Path = tmp_path / "x"
    if kind == "directory":
        Path(path).mkdir()
    elif kind == "empty":
        Path(path).touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "null byte":
        path = "a\0b"
    elif kind == "device":
        path = "/dev/zero"
    with pytest.raises(CaseFileError) as caught:
        read_case(path)
    assert caught.value.argument == ("file size" if kind == "empty" else "path")
    assert str(caught.value).isprintable()


def test_error_of_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(encode_case(small_case())[:-1])
    with pytest.raises(CaseFileError, match=r"cut\.safetensors: .*data_offsets"):
        read_case(path)


@pytest.mark.parametrize("name", ["code_8k_l20", "ragged_l15_cut"])
def test_real_cases_are_read(name: str) -> None:
    case = read_case(DATA / f"{name}.safetensors")
    assert case.expected_scores is not None
    visible = np.isfinite(case.expected_scores).sum(axis=2)
    assert (visible == case.num_blocks_per_query()).all()
    assert "SmolLM2" in case.source


def test_reading_needs_no_torch() -> None:
    program = "import sys, indexer.case; sys.exit('torch' in sys.modules)"
    printed_by("-c", program)


def test_num_blocks_follow_the_contract() -> None:
    case = small_case()
    # Positions 127, 128, 129 of the first request and 3, 4 of the second.
    assert case.num_blocks_per_query().tolist() == [1, 2, 2, 1, 1]
    assert case.num_score_blocks == 2
    assert case.rows == 10
    assert case.total_k == 135


def test_fields_of_numpy_integers_are_kept_as_python_s() -> None:
    case = small_case(topk=np.int64(5), init_blocks=np.uint8(1), local_blocks=np.int32(0))
    assert [type(field) for field in (case.topk, case.init_blocks, case.local_blocks)] == [int] * 3
    assert decode_case(encode_case(case)).topk == 5
    for topk in (np.float32(5), np.True_, True):
        with pytest.raises(CaseFileError, match=r"topk = .* must be a whole number"):
            small_case(topk=topk)


# Case files that are wrong: each is refused by name, and none costs more memory than its own bytes.

Header = dict[str, Any]
VALID = encode_case(small_case())


def refused(body: bytes) -> CaseFileError:
    with pytest.raises(CaseFileError) as caught:
        decode_case(body)
    message = str(caught.value)
    assert message.isprintable(), "what a hostile file says must not reach a terminal raw"
    assert len(message) < 500
    return caught.value


def test_error_is_an_invalid_argument() -> None:
    assert issubclass(CaseFileError, InvalidArgumentError)
    assert issubclass(CaseFileError, IndexerError)


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        (b"", "file size"),
        (VALID[:7], "file size"),
        (b"\x00" * 8, "header"),
        (b"\xff" * 8 + VALID[8:], "header length"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{" + b" " * MAX_HEADER_BYTES, "header length"),
        (VALID[:100], "header length"),
        (VALID + b"\x00", "file size"),
        (join(b"[]", b""), "header"),
        (join(b" {}", b""), "header"),
        (join(b"{", b""), "header"),
        (join(b"{} x", b""), "header"),
        (join(b'{"a": NaN}', b""), "header"),
        (join(b'{"a": 1e3}', b""), "header"),
        (join(b'{"a": 1.5}', b""), "header"),
        (join(b'{"a": ' + b"9" * 5000 + b"}", b""), "header"),
        (join(b'{"a": ' + b"[" * 60_000, b""), "header"),
        (join(b'{"a": ' + b'{"a":' * 10_000, b""), "header"),
        (join(b'{"a": "\xff"}', b""), "header"),
        (join(b'{"a": 1, "a": 1}', b""), "header"),
        (join(b'{"__metadata__": {"topk": "1", "topk": "2"}}', b""), "header"),
        (join({"__metadata__": []}, b""), "__metadata__"),
        (join({"__metadata__": None}, b""), "__metadata__"),
        (join({}, b""), "metadata format"),
    ],
)
def test_broken_container_is_refused(body: bytes, argument: str) -> None:
    assert refused(body).argument == argument


@pytest.mark.parametrize(
    ("field", "value", "argument"),
    [
        ("dtype", "F64", "'index_k'.dtype"),
        ("dtype", "bf16", "'index_k'.dtype"),
        ("dtype", None, "'index_k'.dtype"),
        ("dtype", ["BF16"], "'index_k'.dtype"),
        ("dtype", "F32", "'index_k'.data_offsets"),
        ("shape", [-135, -128], "'index_k'.shape"),
        ("shape", [True, 17280], "'index_k'.shape"),
        ("shape", ["135", 128], "'index_k'.shape"),
        ("shape", 17280, "'index_k'.shape"),
        ("shape", [1] * 5000, "'index_k'.shape"),
        ("shape", [10**17, 10**17, 10**17], "'index_k'.shape"),
        ("shape", [0, 10**18 - 1], "'index_k'.shape"),
        ("shape", [2**32, 2**31], "'index_k'.shape"),
        ("shape", [136, 128], "'index_k'.data_offsets"),
        ("data_offsets", [0], "'index_k'.data_offsets"),
        ("data_offsets", [-1, 34559], "'index_k'.data_offsets"),
        ("data_offsets", [34560, 0], "'index_k'.data_offsets"),
        ("data_offsets", [10**17, 10**17 + 34560], "'index_k'.data_offsets"),
        ("data_offsets", [0, None], "'index_k'.data_offsets"),
        ("data_offsets", {"begin": 0}, "'index_k'.data_offsets"),
    ],
)
def test_broken_tensor_is_refused(field: str, value: object, argument: str) -> None:
    assert refused(edit(lambda header: header["index_k"].update({field: value}))).argument == argument


def test_tensor_with_a_field_too_few_or_too_many_is_refused() -> None:
    assert refused(edit(lambda header: header["index_k"].pop("shape"))).argument == "'index_k'"
    assert refused(edit(lambda header: header["index_k"].update(stride=[1]))).argument == "'index_k'"
    assert refused(edit(lambda header: header.update(index_k=7))).argument == "'index_k'"


def test_overlapping_tensors_are_refused() -> None:
    def overlap(header: Header) -> None:
        header["index_q"]["data_offsets"] = [0, 2560]
        header["index_k"]["data_offsets"] = [0, 34560]

    assert refused(edit(overlap)).argument.endswith("data_offsets")


def test_gap_between_tensors_is_refused() -> None:
    header, tail = small_parts()
    last = max(
        (entry for name, entry in header.items() if name != "__metadata__"),
        key=lambda e: e["data_offsets"][1],
    )
    last["data_offsets"] = [last["data_offsets"][0] + 4, last["data_offsets"][1] + 4]
    error = refused(join(header, tail + b"\x00" * 4))
    assert error.argument.endswith("data_offsets")
    assert "gap" in error.remedy


@pytest.mark.parametrize("cut", [1, 2, 100, 34_000])
def test_truncated_file_is_refused(cut: int) -> None:
    refused(VALID[:-cut])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "nvfp4-indexer-scores"),
        ("format", None),
        ("version", "2"),
        ("version", None),
        ("topk", None),
        ("topk", ""),
        ("topk", "0x10"),
        ("topk", " 16"),
        ("topk", "016"),
        ("topk", "+16"),
        ("topk", "1_6"),
        ("topk", "16\n"),
        ("topk", "\u0661\u0666"),
        ("topk", "1e1"),
        ("topk", "9" * 5000),
        ("init_blocks", "-1"),
        ("local_blocks", "1.0"),
    ],
)
def test_wrong_metadata_is_refused(field: str, value: str | None) -> None:
    def change(header: Header) -> None:
        if value is None:
            del header["__metadata__"][field]
        else:
            header["__metadata__"][field] = value

    assert refused(edit(change)).argument == f"metadata {field}"


@pytest.mark.parametrize(
    ("field", "value"), [("topk", "0"), ("topk", "65"), ("source", "\x1b[2J"), ("source", "\ud800")]
)
def test_value_outside_its_limits_is_refused(field: str, value: str) -> None:
    assert refused(edit(lambda header: header["__metadata__"].update({field: value}))).argument == field


def test_metadata_that_is_no_string_or_not_known_is_refused() -> None:
    assert refused(edit(lambda header: header["__metadata__"].update(topk=16))).argument == "metadata 'topk'"
    error = refused(edit(lambda header: header["__metadata__"].update({"\x1b]0;": "x"})))
    assert (error.argument, error.value) == ("metadata", "'\\x1b]0;'")


def test_unknown_and_missing_tensors_are_refused() -> None:
    assert refused(edit(lambda header: header.update(index_v=header.pop("index_k")))).argument == "tensor"
    for name in ("index_q", "cu_seqlens_q", "seq_lens"):
        header, tail = split(encode_case(small_case()))
        begin, end = header.pop(name)["data_offsets"]
        for entry in header.values():
            offsets = entry.get("data_offsets")
            if offsets and offsets[0] >= end:
                entry["data_offsets"] = [offset - (end - begin) for offset in offsets]
        assert refused(join(header, tail[:begin] + tail[end:])).argument == name


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


PAGES = np.zeros((4, 9216), dtype=np.uint8)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"cu_seqlens_q": int32(1, 3, 5)}, "cu_seqlens_q[0]"),
        ({"cu_seqlens_q": int32(0, 6, 5)}, "cu_seqlens_q[2]"),
        ({"cu_seqlens_q": int32(0, -(2**31), 5)}, "cu_seqlens_q[1]"),
        ({"cu_seqlens_q": int32(0, 3, 4)}, "cu_seqlens_q[-1]"),
        ({"cu_seqlens_q": int32(0, 5)}, "cu_seqlens_q.shape"),
        ({"cu_seqlens_q": int32()}, "cu_seqlens_q.shape"),
        ({"cu_seqlens_q": np.array([0.0, 3, 5], dtype=np.float32)}, "cu_seqlens_q.dtype"),
        ({"seq_lens": int32(134, 1)}, "seq_lens[1]"),
        ({"seq_lens": int32(-1, 5)}, "seq_lens[0]"),
        ({"seq_lens": int32(2**20 + 1, 5)}, "seq_lens[0]"),
        ({"seq_lens": int32(131, 5)}, "index_k.shape[0]"),
        ({"seq_lens": np.zeros((2, 1), dtype=np.int32)}, "seq_lens.shape"),
        ({"index_q": np.zeros((5, 3, 128), dtype=np.float32)}, "index_q.shape[1]"),
        ({"index_q": np.zeros((5, 2, 64), dtype=np.float32)}, "index_q.shape"),
        ({"index_q": np.zeros((5, 2, 128), dtype=np.int32)}, "index_q.dtype"),
        ({"index_k": np.zeros((135, 128), dtype=np.uint8)}, "index_k.dtype"),
        ({"index_k": np.zeros((135, 64), dtype=np.float32)}, "index_k.shape"),
        ({"index_k": None}, "keys"),
        ({"pages": PAGES, "block_table": int32(0, 1)}, "keys"),
        ({"index_k": None, "pages": PAGES}, "keys"),
        ({"index_k": None, "block_table": np.zeros((2, 2), dtype=np.int32)}, "keys"),
        ({"expected_scores": np.zeros((2, 5, 1), dtype=np.float32)}, "expected_scores.shape[2]"),
        ({"expected_scores": np.zeros((5, 2, 2), dtype=np.float32)}, "expected_scores.shape"),
        ({"expected_block_ids": np.zeros((2, 5, 15), dtype=np.int32)}, "expected_block_ids.shape"),
        ({"expected_block_ids": np.zeros((2, 5, 16), dtype=np.float32)}, "expected_block_ids.dtype"),
    ],
)
def test_call_outside_the_contract_is_refused(changes: Header, argument: str) -> None:
    with pytest.raises(CaseFileError) as caught:
        small_case(**changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"pages": np.zeros((4, 9215), dtype=np.uint8)}, "pages"),
        ({"pages": np.zeros((4, 72, 128), dtype=np.uint8)}, "pages"),
        ({"pages": np.zeros((4, 9216), dtype=np.int32)}, "pages"),
        ({"block_table": np.array([[3, 4], [0, -1]], dtype=np.int32)}, "block_table[0, 1]"),
        ({"block_table": np.array([[3, 1], [-1, -1]], dtype=np.int32)}, "block_table[1, 0]"),
        ({"block_table": np.array([[3], [0]], dtype=np.int32)}, "block_table.shape[1]"),
        ({"block_table": np.array([[3, 1]], dtype=np.int32)}, "block_table.shape"),
        ({"pages": PAGES[:0]}, "block_table[0, 0]"),
    ],
)
def test_pages_outside_the_contract_are_refused(changes: Header, argument: str) -> None:
    with pytest.raises(CaseFileError) as caught:
        paged_case(**changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["index_q", "index_k", "seq_lens", "pages"])
def test_a_masked_array_is_refused(name: str) -> None:
    """What it hides would be read as values."""
    make: Any = paged_case if name == "pages" else small_case
    array = getattr(make(), name)
    with pytest.raises(CaseFileError, match=rf"^{name} = a masked array: .*; call \.filled\(\)"):
        make(**{name: np.ma.array(array, mask=np.ones(array.shape, bool))})


def test_float64_is_advised_the_type_that_keeps_most_of_it() -> None:
    for name in ("index_q", "index_k"):
        array = getattr(small_case(), name)
        with pytest.raises(CaseFileError, match=r"^index_.\.dtype = float64: .*; call \.astype\(float32\)"):
            small_case(**{name: array.astype(np.float64)})


def test_table_of_a_request_without_queries_is_not_looked_at() -> None:
    case = paged_case(
        cu_seqlens_q=int32(0, 5, 5),
        block_table=np.array([[0, 3], [-7, 99]], dtype=np.int32),
        seq_lens=int32(130, 2**20),
    )
    assert case.num_score_blocks == 2


def test_many_requests_are_checked_without_a_loop_over_them() -> None:
    count = 200_000
    case = small_case(
        cu_seqlens_q=np.concatenate([int32(0), np.full(count, 5, dtype=np.int32)]),
        seq_lens=np.concatenate([int32(135), np.zeros(count - 1, dtype=np.int32)]),
    )
    assert case.batch == count
    assert case.num_blocks_per_query().tolist() == [2, 2, 2, 2, 2]


# Case files of any content: refused by name or read, never anything else, and never at a cost in memory.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.integers(-2, 2**62) | st.sampled_from((0, 1, 2, 128, 34560, 2**31, 2**32))


def outcome(body: bytes) -> None:
    """Decode; only a :class:`CaseFileError` may leave, and only a little memory may be taken."""
    message = ""
    tracemalloc.start()
    try:
        decode_case(body)
    except CaseFileError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert message.isprintable()
    assert peak < 4 << 20


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_any_json_header_is_refused_or_read(header: object) -> None:
    outcome(join(json.dumps(header).encode(), b"\x00" * 64))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(small_parts()[0])),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(("F32", "I32", "U8", "BF16", "F8_E4M3", "F16", "F64", "")) | JSON,
            "shape": st.lists(SIZES, max_size=5) | JSON,
            "data_offsets": st.lists(SIZES, max_size=3) | JSON,
            "topk": st.text(max_size=8),
        },
    ),
)
def test_any_change_to_an_entry_is_refused_or_read(name: str, change: dict[str, Any]) -> None:
    outcome(edit(lambda header: header[name].update(change)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_flipped_byte_is_refused_or_read(draw: st.DataObject) -> None:
    body = bytearray(VALID)
    for _ in range(draw.draw(st.integers(1, 3))):
        body[draw.draw(st.integers(0, 900))] = draw.draw(st.integers(0, 255))
    outcome(bytes(body))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    outcome(body)
    outcome(join(b"{" + body, b""))
