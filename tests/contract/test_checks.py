"""Illegal inputs: each is a ValueError that names the argument, the value and the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel import checks
from kernel.batch import ScoreBatch
from kernel.errors import IndexerError, InvalidArgumentError
from kernel.page import blocks_of
from tests.support.calls import random_call

LENGTHS = [(300, 5), (0, 0), (129, 1), (0, 0)]
"""Requests of 3, 0, 2 and 0 blocks."""
CALL = random_call(LENGTHS, 4, seed=71)
"""A legal call on a cache of 13 pages."""


def changed(name: str, position: tuple[int, ...] | int, value: int) -> torch.Tensor:
    tensor: torch.Tensor = getattr(CALL, name).clone()
    tensor[position] = value
    return tensor


ILLEGAL: list[tuple[str, object, str, str, str]] = [
    ("seq_lens", changed("seq_lens", 0, 4), "seq_lens[0]", "4", "5 queries"),
    ("seq_lens", changed("seq_lens", 3, -1), "seq_lens[3]", "-1", "0 queries"),
    ("seq_lens", changed("seq_lens", 0, 1_048_577), "seq_lens[0]", "1048577", "1048576"),
    ("seq_lens", CALL.seq_lens.long(), "seq_lens.dtype", "torch.int64", "torch.int32"),
    ("seq_lens", CALL.seq_lens[:3], "seq_lens.shape", "(3,)", "[4]"),
    ("cu_seqlens_q", changed("cu_seqlens_q", 2, 4), "cu_seqlens_q[2]", "4", "5"),
    ("cu_seqlens_q", changed("cu_seqlens_q", 0, 1), "cu_seqlens_q[0]", "1", "0"),
    ("cu_seqlens_q", changed("cu_seqlens_q", 4, 7), "cu_seqlens_q[-1]", "7", "total_q = 6"),
    ("cu_seqlens_q", CALL.cu_seqlens_q.long(), "cu_seqlens_q.dtype", "torch.int64", "torch.int32"),
    ("cu_seqlens_q", CALL.cu_seqlens_q[:-1], "cu_seqlens_q.shape", "(4,)", "[5]"),
    ("block_table", CALL.block_table[:, :2], "block_table.shape[1]", "2", "3"),
    ("block_table", changed("block_table", (0, 2), -1), "block_table[0, 2]", "-1", "[0, 13)"),
    ("block_table", changed("block_table", (2, 1), 13), "block_table[2, 1]", "13", "[0, 13)"),
    ("block_table", changed("block_table", (0, 0), 2**31 - 1), "block_table[0, 0]", "2147483647", "[0, 13)"),
    ("block_table", CALL.block_table.long(), "block_table.dtype", "torch.int64", "torch.int32"),
    ("block_table", CALL.block_table[0], "block_table.shape", "(6,)", "[any, any]"),
    ("q", CALL.q.float(), "q.dtype", "torch.float32", "torch.float8_e4m3fn"),
    ("q", CALL.q.view(torch.uint8), "q.dtype", "torch.uint8", "torch.float8_e4m3fn"),
    ("q", CALL.q[:, :, :64], "q.shape", "(6, 4, 64)", "128]"),
    ("q", CALL.q.flatten(1), "q.shape", "(6, 512)", "128]"),
    ("pages", CALL.pages.view(torch.int8), "pages.dtype", "torch.int8", "torch.uint8"),
    ("pages", CALL.pages[:, :9200], "pages.shape", "(13, 9200)", "9216"),
    ("init_blocks", -1, "init_blocks", "-1", "0 or more"),
    ("init_blocks", True, "init_blocks", "True", "int"),
    ("local_blocks", -3, "local_blocks", "-3", "0 or more"),
    ("local_blocks", 1.0, "local_blocks", "1.0", "int"),
]
"""What is changed, to what, and the argument, the value and the limit that the refusal names."""


@pytest.mark.parametrize(
    ("field", "value", "argument", "shown", "limit"),
    [pytest.param(*case, id=f"{case[2]} = {case[3]}") for case in ILLEGAL],
)
def test_a_call_is_refused_by_the_argument_at_fault(
    field: str, value: object, argument: str, shown: str, limit: str
) -> None:
    """Lengths, offsets, widths, page ids, dtypes and shapes: argument, value, limit and remedy are named."""
    CALL.batch()
    with pytest.raises(InvalidArgumentError) as caught:
        replace(CALL, **{field: value}).batch()  # type: ignore[arg-type]
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, IndexerError)
    assert error.argument == argument
    assert limit in error.limit
    assert error.remedy
    assert str(error) == f"{argument} = {shown}: {error.limit}; {error.remedy}"


def checked_with(argument: str, value: object) -> ScoreBatch:
    arguments = {
        name: getattr(CALL, name) for name in ("q", "pages", "block_table", "cu_seqlens_q", "seq_lens")
    }
    return checks.checked_batch(
        **arguments | {argument: value},
        lut=torch.zeros(256, 8, dtype=torch.uint8),
        num_heads=4,
        init_blocks=0,
        local_blocks=0,
    )


@pytest.mark.parametrize("argument", ["q", "block_table", "cu_seqlens_q", "seq_lens"])
def test_another_device_is_refused(argument: str) -> None:
    """Every tensor lies on the device of the pages."""
    with pytest.raises(InvalidArgumentError, match=rf"^{argument}\.device = meta: must be cpu"):
        checked_with(argument, getattr(CALL, argument).to("meta"))


@pytest.mark.parametrize("argument", ["q", "block_table", "cu_seqlens_q", "seq_lens"])
def test_what_is_no_tensor_is_refused(argument: str) -> None:
    """Lists and arrays are not converted in silence."""
    with pytest.raises(InvalidArgumentError, match=rf"^{argument} = list: must be a torch.Tensor"):
        checked_with(argument, [1, 2])


def test_padding_and_requests_without_queries_are_legal() -> None:
    """Padding columns and those of a request without queries may hold anything; batch = 0 is legal."""
    call = random_call([(300, 5), (517, 0), (0, 0)], 2, seed=73)
    call.block_table[1:] = -1
    call.block_table[0, 3:] = 2**31 - 1
    requests = call.batch().requests
    assert [request.num_blocks for request in requests] == [3, 0, 0]
    assert random_call([], 2).batch().requests == ()


def test_requests_are_what_the_lengths_say() -> None:
    """pos = seq_len - q_len + j, nb = pos // 128 + 1, for every prefix mod 128."""
    lengths = [(prefix + 3, 3) for prefix in range(260)]
    batch = random_call(lengths, 1, seed=74).batch()
    expected = [
        (seq_len - query_len + j) // 128 + 1 for seq_len, query_len in lengths for j in range(query_len)
    ]
    assert batch.num_blocks_per_query().tolist() == expected
    assert batch.num_score_blocks == blocks_of(262)
    assert [request.query_start for request in batch.requests] == list(range(0, 780, 3))


@pytest.mark.parametrize("heads", [0, -1, 3, 5, 6, 7, 8, 16, 2.0, "4", None, True])
def test_other_head_counts_are_refused(heads: object) -> None:
    """H in {1, 2, 4}; anything else is refused by name."""
    with pytest.raises(InvalidArgumentError, match=r"^num_index_heads = .*: must be "):
        checks.check_heads(heads)  # type: ignore[arg-type]


def test_the_legal_head_counts_pass() -> None:
    """H in {1, 2, 4}."""
    for heads in (1, 2, 4):
        checks.check_heads(heads)


@pytest.mark.parametrize("topk", [0, -1, 65, 1000, 16.0, "16", None, True])
def test_other_k_are_refused(topk: object) -> None:
    """k from 1 to 64."""
    with pytest.raises(InvalidArgumentError, match=r"^topk = .*: must be "):
        checks.check_topk("topk", topk)  # type: ignore[arg-type]
    for legal in range(1, 65):
        checks.check_topk("topk", legal)


@pytest.mark.parametrize("order", ["", "Score", "ascending", None, 1])
def test_other_orders_are_refused(order: object) -> None:
    """order is "score" or "block"."""
    with pytest.raises(InvalidArgumentError, match=r"^order = .*: must be 'score' or 'block'"):
        checks.check_order(order)  # type: ignore[arg-type]
    checks.check_order("score")
    checks.check_order("block")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_where_they_stand(dtype: torch.dtype, value: float) -> None:
    """Non-finite keys or queries are refused with the first offending position."""
    values = torch.zeros(3, 4, 128)
    checks.check_finite("q", values.to(dtype))
    values[1, 2, 3] = values[1, 2, 4] = values[2, 0, 0] = value
    if dtype == torch.float8_e4m3fn:  # the format has no infinity
        values = values.nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=torch.nan)
    with pytest.raises(InvalidArgumentError, match=r"^q\[1, 2, 3\] = -?(nan|inf): must be finite"):
        checks.check_finite("q", values.to(dtype))


@pytest.mark.parametrize(
    ("scores", "argument"),
    [
        pytest.param(torch.zeros(4, 6, 2), "scores.shape[2]", id="narrow"),
        pytest.param(torch.zeros(6, 4, 3), "scores.shape", id="token-major"),
        pytest.param(torch.zeros(4, 5, 3), "scores.shape", id="other rows"),
        pytest.param(torch.zeros(24, 3), "scores.shape", id="rank"),
        pytest.param(torch.zeros(4, 6, 3).double(), "scores.dtype", id="dtype"),
        pytest.param(torch.zeros(4, 6, 6)[:, :, ::2], "scores.stride(2)", id="every other cell"),
        pytest.param(torch.zeros(3, 4, 6).permute(1, 2, 0), "scores.stride(2)", id="block-major"),
        pytest.param(torch.zeros(4, 6, 3, device="meta"), "scores.device", id="device"),
    ],
)
def test_score_buffers_are_refused_by_name(scores: torch.Tensor, argument: str) -> None:
    """An S too narrow for the longest request, a wrong dtype, shape, stride or device of the score buffer."""
    batch: ScoreBatch = random_call(LENGTHS, 4, seed=75).batch()
    with pytest.raises(InvalidArgumentError) as caught:
        checks.check_scores_buffer(scores, batch.q, batch.num_score_blocks, {"pages": batch.pages})
    assert caught.value.argument == argument


def test_score_buffers_of_any_row_and_head_stride_are_legal() -> None:
    """Only stride(2) is fixed."""
    batch = random_call(LENGTHS, 4, seed=75).batch()
    storage = torch.zeros(6, 5, 9)
    buffer = storage[:, :4, 2:6].transpose(0, 1)
    checks.check_scores_buffer(buffer, batch.q, batch.num_score_blocks, {"pages": batch.pages})
