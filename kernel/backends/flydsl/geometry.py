"""Sizes of the gfx950 prefill scorer, each derived from the page format and the matrix instruction."""

from __future__ import annotations

from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, HEAD_DIM
from kernel.plan import TILE_ROWS

LANES = 64
"""Lanes of a wave."""
WAVES = 4
"""Waves of a workgroup, one for each SIMD of a CU."""
THREADS = WAVES * LANES
WAVES_PER_SIMD = 2
"""Waves that must fit a SIMD at once: 512 registers a lane, so 256 for each."""

MFMA_ROWS = 16
"""Query rows (N) and key tokens (M) of one ``v_mfma_f32_16x16x128_f8f6f4``; its K is the head dim."""
ACCUMULATORS = MFMA_ROWS * MFMA_ROWS // LANES
"""Accumulators of a lane: consecutive tokens of one query row."""
WAVE_ROWS = TILE_ROWS // WAVES
N_TILES = WAVE_ROWS // MFMA_ROWS
"""MFMA tiles of query rows that a wave owns."""
M_TILES = BLOCK_TOKENS // MFMA_ROWS
"""MFMA tiles of key tokens in a block."""
WAVE_TOKENS = N_TILES * MFMA_ROWS
"""Query tokens from the first to the last row of a wave: its N-tiles lie 16 tokens apart."""
REDUCED_ROWS = 2
"""Query rows whose scores a lane holds once a block is reduced: of N-tile ``lane // 16`` and of the fourth
after it."""

OPERAND_BYTES = 16
"""Bytes of one LDS read or write of keys, a column of a key row."""
COLUMNS = HEAD_DIM // OPERAND_BYTES
LANE_CODE_BYTES = CODE_BYTES // THREADS
LANE_SCALE_BYTES = BLOCK_TOKENS * GROUPS // THREADS

SLOT_BYTES = BLOCK_TOKENS * HEAD_DIM
"""LDS bytes of a dequantised block; two slots, one read while the other is written."""
LUT_ENTRIES = 256
LUT_ENTRY_BYTES = 8
LUT_AT = 2 * SLOT_BYTES
LDS_BYTES = LUT_AT + LUT_ENTRIES * LUT_ENTRY_BYTES
