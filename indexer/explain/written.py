"""This step's keys against the bytes that the engine's pages hold for them: the writer's side."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.explain.causes import nibbles, scale_group, scale_order, sign
from indexer.explain.engine_verdict import Cause, WrittenKeys
from indexer.explain.page_keys import PageKeys, right_keys
from kernel.backends.reference.quantizer import dequantize_keys, quantize_keys
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, PAGE_BYTES, TOKEN_CODE_BYTES

CHUNK_TOKENS = 4096
SAMPLE_TOKENS = 256
"""Wrong tokens that a cause is looked for in."""
READINGS: tuple[tuple[str, str, PageKeys], ...] = (
    ("nibbles are written swapped", nibbles.FAMILY, nibbles.swapped),
    ("nibbles are written planar", nibbles.FAMILY, nibbles.planar),
    ("scales are written interleaved with codes", scale_order.FAMILY, scale_order.interleaved),
    ("scales are written group-major", scale_order.FAMILY, scale_order.group_major),
    ("scales are written swizzled", scale_order.FAMILY, scale_order.swizzled),
    ("scales are written before the codes", scale_order.FAMILY, scale_order.scales_first),
    *(
        (f"scales are written wrong: {name}", scale_group.FAMILY, scale_group.grouped(groups))
        for name, _, groups in scale_group.GROUPINGS[:5]
    ),
    ("keys are written with the other sign", sign.FAMILY, sign.negated),
    ("keys are not written", "stale or unwritten page", lambda pages: np.zeros((len(pages), 128, 128), "f4")),
)


def check_written(case: Case) -> WrittenKeys | None:
    """Compare, where a case has both keys of the step and pages."""
    record = case.engine
    if record is None or record.new_keys is None or case.pages is None or case.block_table is None:
        return None
    pages = case.pages.reshape(-1, PAGE_BYTES)
    request = np.repeat(np.arange(case.batch), case.query_lens)
    prefix = case.seq_lens.astype(np.int64) - case.query_lens - case.cu_seqlens_q[:-1]
    position = np.arange(case.total_q) + prefix[request]
    place, slot = case.block_table[request, position // BLOCK_TOKENS], position % BLOCK_TOKENS
    wrong = np.zeros(case.total_q, dtype=bool)
    for first in range(0, case.total_q, CHUNK_TOKENS):
        chunk = slice(first, first + CHUNK_TOKENS)
        codes, scales = quantize_keys(record.new_keys[chunk].astype(np.float64))
        at_codes = slot[chunk, None] * TOKEN_CODE_BYTES + np.arange(TOKEN_CODE_BYTES)
        at_scales = CODE_BYTES + slot[chunk, None] * GROUPS + np.arange(GROUPS)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        wrong[chunk] = (pages[place[chunk, None], at_codes] != packed).any(axis=1)
        wrong[chunk] |= (pages[place[chunk, None], at_scales] != scales).any(axis=1)
    at = np.flatnonzero(wrong)
    cause = None
    if at.size:
        cause = _cause(pages, record.new_keys, place, slot, at)
    return WrittenKeys(
        tokens=case.total_q,
        wrong=int(at.size),
        worst_request=int(request[at[0]]) if at.size else -1,
        worst_position=int(position[at[0]]) if at.size else -1,
        cause=cause,
    )


def _cause(
    pages: NDArray[np.uint8],
    keys: NDArray[np.generic],
    place: NDArray[np.int32],
    slot: NDArray[np.int64],
    wrong: NDArray[np.int64],
) -> Cause | None:
    """The layout in which the wrong tokens' bytes are the right keys."""
    at = wrong[np.unique(np.linspace(0, len(wrong) - 1, SAMPLE_TOKENS).round().astype(np.int64))]
    codes, scales = quantize_keys(keys[at].astype(np.float64))
    wanted = dequantize_keys(codes, scales).astype(np.float32)
    used, inverse = np.unique(place[at], return_inverse=True)
    best: Cause | None = None
    for name, family, reading in READINGS:
        read = reading(pages[used])[inverse, slot[at]]
        if name == "keys are not written":
            given = np.asarray((right_keys(pages[used])[inverse, slot[at]] == 0).all(axis=1))
        else:
            given = np.asarray((read == wanted).all(axis=1))
        explained = int(given.sum())
        if explained > 0.9 * len(at) and (best is None or explained > best.explained):
            says = (
                "The bytes of this step's keys are right if the page is read in that way: the writer has it."
            )
            if name == "keys are not written":
                says = "The bytes of this step's keys are zero: the insert did not run, or not yet."
            best = Cause(name, family, says, explained, len(at), 0, 0, 0)
    return best
