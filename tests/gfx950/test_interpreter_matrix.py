"""``v_mfma_f32_16x16x128_f8f6f4``: which byte of which lane is which element, and the arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kernel.gfx950 import MissingWaitError, UndefinedReadError, UnsupportedInstructionError
from tests.gfx950.one_wave import run_lanes

COVERED = {"v_mfma_f32_16x16x128_f8f6f4"}
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
Bytes = npt.NDArray[np.uint8]


def place(matrix: Bytes, first: str) -> dict[str, npt.NDArray[np.uint32]]:
    """``[16, 128]`` operand bytes into 8 registers from ``first`` ("v16", "a0") on.

    Lane l holds row l % 16, 16 columns from 16 g and 16 from 64 + 16 g, where g = l // 16.
    """
    lanes = np.zeros((64, 32), np.uint8)
    for lane in range(64):
        row, group = lane % 16, lane // 16
        lanes[lane, :16] = matrix[row, 16 * group : 16 * group + 16]
        lanes[lane, 16:] = matrix[row, 64 + 16 * group : 80 + 16 * group]
    words = lanes.view(np.uint32)
    return {f"{first[0]}{int(first[1:]) + at}": np.ascontiguousarray(words[:, at]) for at in range(8)}


def result(found: dict[str, npt.NDArray[np.uint32]], names: list[str]) -> npt.NDArray[np.float32]:
    """The 16 x 16 result of four registers: lane l, register i is row 4 (l // 16) + i, column l % 16."""
    matrix = np.zeros((16, 16), np.float32)
    for at, name in enumerate(names):
        for lane in range(64):
            matrix[4 * (lane // 16) + at, lane % 16] = found[name].view(np.float32)[lane]
    return matrix


OUT = [f"v{at}" for at in range(4, 8)]
TEXT = "v_mfma_f32_16x16x128_f8f6f4 v[4:7], v[16:23], v[24:31], "


def multiply(a: Bytes, b: Bytes, c: str = "0", **more: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    vectors = {**place(a, "v16"), **place(b, "v24"), **more}
    return result(run_lanes(TEXT + c, vectors=vectors, read_vectors=OUT).vectors, OUT)


def one_hot(row: int, column: int, value: float, dtype: type = E4M3) -> Bytes:
    matrix: npt.NDArray[Any] = np.zeros((16, 128), dtype)
    matrix[row, column] = value
    return matrix.view(np.uint8)


def test_every_position_of_k_is_its_own() -> None:
    # A holds a power of two of its own at k and B picks k: a wrong byte gives another value or place
    rng = np.random.default_rng(0)
    for k in rng.permutation(128)[:24].tolist():
        m, n = k * 7 % 16, k * 5 % 16
        found = multiply(one_hot(m, k, 2.0 ** (k % 15 - 7)), one_hot(n, k, 3.0))
        wanted = np.zeros((16, 16), np.float32)
        wanted[m, n] = 3 * 2.0 ** (k % 15 - 7)
        np.testing.assert_array_equal(found, wanted)


def test_an_asymmetric_product_with_c_is_exact() -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 9, (16, 128)).astype(np.float32)
    b = rng.integers(-8, 9, (16, 128)).astype(np.float32)
    b[3] *= 16
    c = rng.integers(-1000, 1000, (16, 16)).astype(np.float32)
    more = {}
    for at in range(4):
        lanes = [c[4 * (lane // 16) + at, lane % 16] for lane in range(64)]
        more[f"v{8 + at}"] = np.array(lanes, np.float32).view(np.uint32)
    found = multiply(a.astype(E4M3).view(np.uint8), b.astype(E4M3).view(np.uint8), "v[8:11]", **more)
    np.testing.assert_array_equal(found, a @ b.T + c)


@pytest.mark.parametrize(("constant", "value"), [("0", 0.0), ("1.0", 1.0), ("-4.0", -4.0)])
def test_inline_constants_as_c(constant: str, value: float) -> None:
    found = multiply(one_hot(2, 5, 1.5), one_hot(3, 5, 2.0), constant)
    wanted = np.full((16, 16), value, np.float32)
    wanted[2, 3] += 3
    np.testing.assert_array_equal(found, wanted)


def test_sums_are_rounded_once() -> None:
    rng = np.random.default_rng(2)
    finite = [x for x in range(256) if x & 127 != 127]
    a, b = rng.choice(np.array(finite, np.uint8), (2, 16, 128))
    found = multiply(a, b)
    values = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
    for m, n in ((0, 0), (5, 11), (15, 15)):
        products = (Fraction(values[x]) * Fraction(values[y]) for x, y in zip(a[m], b[n], strict=True))
        exact = sum(products, Fraction(0))
        assert abs(Fraction(float(found[m, n])) - exact) <= abs(exact) * Fraction(1, 2**24)


def test_nan_bytes_make_nan_rows() -> None:
    a = one_hot(4, 9, 1.0)
    a[4, 9] = 0x7F
    found = multiply(a, one_hot(0, 0, 1.0))
    assert np.isnan(found[4]).all()
    assert not np.isnan(np.delete(found, 4, axis=0)).any()


def test_operand_formats() -> None:
    vectors = {**place(one_hot(1, 70, 2.0**14, E5M2), "v16"), **place(one_hot(2, 70, 3.0), "v24")}
    found = run_lanes(TEXT + "0 cbsz:1", vectors=vectors, read_vectors=OUT).vectors
    assert result(found, OUT)[1, 2] == 3 * 2.0**14
    for modifier in ("cbsz:2", "blgp:3", "cbsz:4 blgp:4", "abid:1"):
        with pytest.raises(UnsupportedInstructionError):
            run_lanes(TEXT + "0 " + modifier, vectors=vectors)


def test_accumulator_registers_hold_any_operand() -> None:
    vectors = {**place(one_hot(1, 20, 2.0), "a16"), **place(one_hot(2, 20, 3.0), "v24")}
    names = [f"a{at}" for at in range(4, 8)]
    text = "v_mfma_f32_16x16x128_f8f6f4 a[4:7], a[16:23], v[24:31], 1.0"
    text += "\nv_mfma_f32_16x16x128_f8f6f4 a[4:7], a[16:23], v[24:31], a[4:7]"
    found = result(run_lanes(text, vectors=vectors, read_vectors=names).vectors, names)
    assert found[1, 2] == 13
    assert found[0, 0] == 1


def test_exec_does_not_mask_it_and_every_lane_must_be_defined() -> None:
    vectors = {**place(one_hot(1, 20, 2.0), "v16"), **place(one_hot(2, 20, 3.0), "v24")}
    found = run_lanes(TEXT + "0", vectors=vectors, exec_mask=1, read_vectors=OUT).vectors
    assert result(found, OUT)[1, 2] == 6
    del vectors["v20"]
    with pytest.raises(UndefinedReadError, match="v20"):
        run_lanes("v_mov_b32_e32 v20, 0\n" + TEXT + "0", vectors=vectors, exec_mask=3)


def test_an_operand_in_flight_is_refused() -> None:
    vectors = {**place(one_hot(1, 20, 2.0), "v16"), **place(one_hot(2, 20, 3.0), "v24")}
    text = "v_mov_b32_e32 v41, 0\nds_write_b32 v41, v41\nds_read_b32 v18, v41\n" + TEXT + "0"
    with pytest.raises(MissingWaitError, match="v18"):
        run_lanes(text, vectors=vectors, lds_bytes=16)
