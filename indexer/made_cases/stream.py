"""Random numbers whose bits do not depend on numpy's version: it promises that of raw PCG64 only."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
PART = 1 << 20
"""Values made at a time: a large case then takes little more memory than its own numbers."""


class Stream:
    """Bell-shaped numbers from a seed: sums of four 16-bit integers, of variance 1 and exact in fp32."""

    _SCALE = np.float32(np.sqrt(3.0) / 65536)

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def normal(self, *shape: int) -> Floats:
        """Numbers of mean 0 and variance 1."""
        values = np.empty(shape, dtype=np.float32)
        for part in np.split(values.reshape(-1), range(PART, values.size, PART)):
            parts = self._raw(part.size).view("<u2").reshape(-1, 4).astype(np.int64)
            # Integers are added in one way only; a mean of floats would differ from machine to machine.
            centred = (2 * parts.sum(axis=1) - 4 * 65535).astype(np.float32)
            np.multiply(centred, np.float32(self._SCALE / 2), out=part)
        return values

    def integers(self, low: int, high: int, count: int) -> NDArray[np.int64]:
        """Integers from ``low`` to ``high - 1``; what a modulus favours is below 2^-32."""
        offsets: NDArray[np.int64] = (self._raw(count) % np.uint64(high - low)).astype(np.int64)
        return offsets + low

    def unit_rms(self, *shape: int) -> Floats:
        """Vectors of mean square 1 over the last axis, as index queries and keys are normalised."""
        values = self.normal(*shape)
        rows = values.reshape(-1, shape[-1])
        for part in np.split(rows, range(PART // shape[-1], len(rows), PART // shape[-1])):
            squares = np.square(part.astype(np.float64)).cumsum(axis=-1)[:, -1:]  # one order of adding
            part /= np.sqrt(squares / shape[-1]).astype(np.float32)
        return values

    def _raw(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(count), dtype="<u8")


def bf16(values: Floats) -> NDArray[np.generic]:
    """As index queries and keys come from a model."""
    return values.astype(ml_dtypes.bfloat16)
