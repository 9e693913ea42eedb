"""Case files that are right: round trips, views without copies, files on disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
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
from kernel.errors import CaseFileError
from tests.support.process import printed_by
from tests.support.raw_case import paged_case, small_case
from tests.support.real_cases import DATA, ROOT

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
        "import sys; from indexer.case import encode_case; from tests.support.raw_case import small_case; "
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
