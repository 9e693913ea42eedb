"""Case files that are wrong: each is refused by name, and none costs more memory than its own bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from indexer.case import decode_case, encode_case
from indexer.case.container import MAX_HEADER_BYTES
from kernel.errors import CaseFileError, IndexerError, InvalidArgumentError
from tests.support.raw_case import edit, join, paged_case, small_case, small_parts, split

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
