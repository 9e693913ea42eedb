"""The page, byte by byte: fixtures made by hand from the format, for the write side and the read side."""

from __future__ import annotations

import functools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernel import nvfp4
from kernel.backends.base import Backend
from kernel.backends.cpu.backend import CpuBackend
from kernel.backends.reference import ReferenceBackend
from kernel.backends.reference.quantizer import (
    E4M3_MAGNITUDES,
    e4m3_bytes,
    e4m3_values,
    magnitude_lut,
    quantize_query,
)
from kernel.checks import as_pages
from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.page import codes_of, scales_of
from tests.support.calls import EVERY_BYTE, NAN, ONE, Call, cumulative, pack_page, random_call, strided_pages
from tests.support.compare import assert_same_bits, assert_within_bounds, inserted, scores_of

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


# The formats: E2M1 codes, E4M3 scales, the LUT, the scored key, the query cast.

E2M1 = (
    Fraction(0),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(3),
    Fraction(4),
    Fraction(6),
)
"""The contract's list of magnitudes."""


@functools.cache
def e4m3(octet: int) -> Fraction:
    """An E4M3 byte's value: sign, 4 exponent bits of bias 7, 3 mantissa bits, subnormal at exponent 0."""
    exponent, mantissa = octet >> 3 & 15, octet & 7
    magnitude = (
        Fraction(mantissa, 8) * Fraction(1, 64)
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -magnitude if octet & 0x80 else magnitude


@functools.cache
def rounded(value: Fraction) -> int:
    """The byte of the E4M3 value nearest to a magnitude: of two equally near the even byte, 448 beyond it."""
    return min(range(NAN), key=lambda octet: (abs(e4m3(octet) - value), octet % 2))


@functools.cache
def expected_lut() -> list[list[int]]:
    """256 x 8 by rational arithmetic."""
    return [[rounded(m * e4m3(s & 0x7F)) if s & 0x7F != NAN else 0 for m in E2M1] for s in range(256)]


def test_e4m3_has_its_values() -> None:
    """E4M3 (float8_e4m3fn): every byte's value, by rational arithmetic and as torch reads it."""
    values = e4m3_values(EVERY_BYTE)
    finite = (EVERY_BYTE & 0x7F) != NAN
    assert [Fraction(value) for value in values[finite]] == [e4m3(int(octet)) for octet in EVERY_BYTE[finite]]
    assert np.isnan(values[~finite]).all()
    as_torch = torch.from_numpy(EVERY_BYTE.copy()).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(values, as_torch, equal_nan=True)


def test_the_lut_holds_every_rounded_product() -> None:
    """LUT: 256 x 8 bytes, e4m3(e2m1 * scale); NaN scales read as 0, a scale's sign is not in it."""
    expected = torch.tensor(expected_lut(), dtype=torch.uint8)
    assert_same_bits(torch.from_numpy(magnitude_lut()), expected)
    assert_same_bits(nvfp4.build_lut("cpu"), expected)
    assert expected[0x7E].tolist() == [0, 0x76, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]  # saturates at 448


def test_every_scale_and_code_is_scored_as_its_rounded_product(backend: Backend) -> None:
    """Scored key = e4m3_rne_satfinite(e2m1 * scale); either sign bit flips it; NaN scales read as 0.

    Page p's first token has scale byte 8p + g in group g and the 16 codes as its dims. Request 32p + r asks
    with one-hot queries of four heads for its dims 4r to 4r + 3, so that one product decides each score.
    """
    pages = np.zeros((32, 9216), dtype=np.uint8)
    for page in range(32):
        codes, scales = np.zeros((128, 128), dtype=np.uint8), np.zeros((128, 8), dtype=np.uint8)
        codes[0] = np.tile(np.arange(16), 8)
        scales[0] = np.arange(8 * page, 8 * page + 8)
        pages[page] = pack_page(codes, scales)
    queries = np.tile(np.eye(128, dtype=np.uint8) * ONE, (32, 1)).reshape(1024, 4, 128)
    call = Call(
        q=torch.from_numpy(queries).view(torch.float8_e4m3fn),
        pages=torch.from_numpy(pages),
        block_table=torch.arange(32, dtype=torch.int32).repeat_interleave(32)[:, None],
        cu_seqlens_q=cumulative([1] * 1024),
        seq_lens=torch.ones(1024, dtype=torch.int32),
    )
    scores = scores_of(backend, call)[:, :, 0].T.reshape(256, 16)
    lut = expected_lut()
    for scale in range(256):
        for code in range(16):
            magnitude = e4m3(lut[scale][code & 7])
            expected = -magnitude if (code >> 3) ^ (scale >> 7) else magnitude
            assert Fraction(scores[scale, code].item()) == expected, f"scale {scale:#x}, code {code}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_are_cast_saturating_to_the_nearest_even(dtype: torch.dtype) -> None:
    """Query cast: saturating RNE to E4M3, no scale; every bfloat16 and every float16."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[torch.isfinite(values)]
    expected = torch.from_numpy(quantize_query(values.double().numpy()))
    assert_same_bits(nvfp4.quantize_query(values).view(torch.uint8), expected)
    in_range = values.abs() < 464
    assert_same_bits(expected[in_range], values[in_range].float().to(torch.float8_e4m3fn).view(torch.uint8))


def test_queries_next_to_a_midpoint_go_to_the_nearer_side() -> None:
    """RNE on float32: halfway goes to the even byte, and the next float32 on either side to its own side."""
    midpoints = ((E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2).astype(np.float32)
    below, above = np.nextafter(midpoints, np.float32(0)), np.nextafter(midpoints, np.float32(1e9))
    values = np.concatenate([below, midpoints, above])
    lower = np.arange(0x7E)
    expected = np.concatenate([lower, lower + lower % 2, lower + 1]).astype(np.uint8)
    assert_same_bits(torch.from_numpy(e4m3_bytes(values)), torch.from_numpy(expected))
    assert_same_bits(
        nvfp4.quantize_query(torch.from_numpy(values)).view(torch.uint8), torch.from_numpy(expected)
    )


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 479.9, 1e9, 3.4e38])
def test_queries_saturate_at_448(value: float) -> None:
    """Saturating cast: nothing past 448 becomes NaN, also where torch's own cast gives one."""
    for sign in (1, -1):
        expected = 0x7E if sign > 0 else 0xFE
        assert nvfp4.quantize_query(torch.tensor([sign * value])).view(torch.uint8).item() == expected
        assert quantize_query(np.array([sign * value])).item() == expected


# Pages that one backend wrote are the bytes that every other writes, and are scored alike by all.

LENGTHS = ((300, 5), (700, 3), (131, 40), (129, 1), (0, 0))
"""Decode steps and a prefill."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_scores_the_pages_of_the_other(backend: Backend, dtype: torch.dtype) -> None:
    call = random_call(LENGTHS, heads=2, seed=11).forcing(0, 1)
    slots = torch.cat(
        [
            call.block_table[request, : -(-seq_len // BLOCK_TOKENS), None].long() * BLOCK_TOKENS
            + torch.arange(BLOCK_TOKENS)
            for request, (seq_len, _) in enumerate(LENGTHS)
            if seq_len
        ]
    ).flatten()
    generator = torch.Generator().manual_seed(12)
    spread = torch.rand(len(slots), 1, generator=generator).mul(12).sub(6).exp2()  # 2^-6 to 2^6
    keys = (torch.randn(len(slots), HEAD_DIM, generator=generator) * spread).to(dtype)
    empty = strided_pages(call.pages.shape[0], 9216 + 64)

    written = inserted(backend, keys, empty, slots)
    for other in (CpuBackend("exact"), ReferenceBackend()):
        theirs = inserted(other, keys, empty, slots)
        assert_same_bits(written, theirs)
        for scorer, pages in ((backend, theirs), (other, written)):
            own = replace(call, pages=pages)
            assert_within_bounds(scores_of(scorer, own), own, scorer.precision)
