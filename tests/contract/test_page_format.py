"""The page, byte by byte: fixtures made by hand from the format, for the write side and the read side."""

from __future__ import annotations

import pytest
import torch

from kernel.backends.base import Backend
from kernel.errors import InvalidArgumentError
from kernel.page import as_pages, codes_of, scales_of
from tests.support.call import Call, cumulative
from tests.support.compare import assert_same_bits
from tests.support.run import inserted, scores_of

# A key unlike any other in every group: group g holds these sixteen times 2^(g - 3). The group's largest
# magnitude is 6 * 2^(g - 3), so its scale is 2^(g - 3), E4M3 byte (7 + g - 3) << 3, and the codes are:
GROUP_VALUES = (6.0, -6.0, 4.0, -4.0, 3.0, -3.0, 2.0, -2.0, 1.5, -1.5, 1.0, -1.0, 0.5, -0.5, 0.0, 0.26)
GROUP_CODES = bytes.fromhex("f7 e6 d5 c4 b3 a2 91 10".replace(" ", ""))
SCALE_BYTES = bytes((4 + g) << 3 for g in range(8))
KEY = torch.tensor([value * 2.0 ** (g - 3) for g in range(8) for value in GROUP_VALUES])


@pytest.mark.parametrize("token", [0, 1, 2, 63, 64, 126, 127])
def test_a_key_is_written_where_the_format_has_it(backend: Backend, token: int) -> None:
    """Codes of token t at t*64, low nibble first; scales at 8192 + t*8 + g; no other byte changes."""
    pages = torch.full((3, 9216), 0x5A, dtype=torch.uint8)
    expected = bytearray(pages.numpy().tobytes())
    expected[9216 + token * 64 : 9216 + (token + 1) * 64] = GROUP_CODES * 8
    expected[9216 + 8192 + token * 8 : 9216 + 8192 + (token + 1) * 8] = SCALE_BYTES
    written = inserted(backend, KEY[None], pages, torch.tensor([128 + token]))
    assert written.numpy().tobytes() == bytes(expected)


@pytest.mark.parametrize("token", [0, 1, 2, 63, 64, 126, 127])
def test_a_key_is_read_where_the_format_has_it(backend: Backend, token: int) -> None:
    """The read side, without the write side: one key in a page of zero keys, found dim by dim."""
    page = bytearray(9216)
    page[token * 64 : (token + 1) * 64] = GROUP_CODES * 8
    page[8192 + token * 8 : 8192 + (token + 1) * 8] = SCALE_BYTES
    dequantised = KEY.clone()
    dequantised[15::16] = torch.tensor([0.5 * 2.0 ** (g - 3) for g in range(8)])  # .26 has gone to .5
    one_hot = torch.eye(128).to(torch.float8_e4m3fn)
    queries = torch.stack([one_hot, (-torch.eye(128)).to(torch.float8_e4m3fn)], dim=1)
    call = Call(
        q=queries,
        pages=torch.frombuffer(page, dtype=torch.uint8)[None],
        block_table=torch.zeros(1, 2, dtype=torch.int32),
        cu_seqlens_q=cumulative([128]),
        seq_lens=torch.tensor([256], dtype=torch.int32),
    )
    # A block of the key and of zeros scores max(q . k, 0), so q and -q together tell the key's value.
    scores = scores_of(backend, call)[:, :, 0]
    assert_same_bits(scores[0] - scores[1], dequantised)


def test_typed_views_are_the_bytes_themselves() -> None:
    """codes_of and scales_of view the page, they do not copy it; row t of [128, 72] is not token t."""
    slab = torch.arange(2 * 9232, dtype=torch.int64).remainder(251).to(torch.uint8).view(2, 9232)
    pages = slab[:, :9216]
    codes, scales = codes_of(pages), scales_of(pages)
    assert codes.shape == (2, 128, 64)
    assert scales.shape == (2, 128, 8)
    assert codes[1, 5, 7] == slab[1, 5 * 64 + 7]
    assert scales[1, 5, 7] == slab[1, 8192 + 5 * 8 + 7]
    codes[1, 127, 63] = 3
    scales[0, 127, 7] = 4
    assert slab[1, 8191] == 3
    assert slab[0, 9215] == 4


def test_shapes_that_engines_use_are_one_page_a_row() -> None:
    """[num_pages, 128, 72] is only a shape: as_pages gives the same bytes, with the same page stride."""
    slab = torch.zeros(4, 9216 + 64, dtype=torch.uint8)
    strided = slab[:, :9216]
    for shaped in (strided, strided.unflatten(1, (128, 72)), strided.unflatten(1, (2, 64, 72))):  # type: ignore[no-untyped-call]
        pages = as_pages(shaped)
        assert pages.shape == (4, 9216)
        assert pages.stride() == (9280, 1)
        assert pages.data_ptr() == slab.data_ptr()
    assert as_pages(slab[:1, :9216]).shape == (1, 9216)
    assert as_pages(torch.zeros(0, 9216, dtype=torch.uint8)).shape == (0, 9216)


def cache(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("pages", "argument"),
    [
        pytest.param(cache(2, 9216, dtype=torch.int8), "pages.dtype", id="dtype"),
        pytest.param(cache(2, 9215), "pages.shape", id="page bytes"),
        pytest.param(cache(9216), "pages.shape", id="one dimension"),
        pytest.param(cache(2, 128, 71), "pages.shape", id="bytes a token"),
        pytest.param(cache(2, 18432)[:, ::2], "pages.stride()", id="every other byte"),
        pytest.param(cache(2, 72, 128).mT, "pages.stride()", id="transposed"),
        pytest.param(cache(2, 9217)[:, :9216], "pages.stride(0)", id="odd stride"),
        pytest.param(cache(2, 9224)[:, :9216], "pages.stride(0)", id="stride of 8"),
        pytest.param(cache(1, 9216).expand(2, 9216), "pages.stride(0)", id="no stride"),
        pytest.param(cache(18448)[8:18440].view(2, 9216), "pages.data_ptr()", id="alignment"),
    ],
)
def test_other_pages_are_refused_by_name(pages: torch.Tensor, argument: str) -> None:
    """A wrong dtype, stride (it is a multiple of 16) or alignment of pages is a ValueError that names it."""
    with pytest.raises(InvalidArgumentError) as refusal:
        as_pages(pages)
    assert refusal.value.argument == argument
    assert isinstance(refusal.value, ValueError)
    assert str(refusal.value).startswith(f"{argument} = ")
