"""How a page becomes keys."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from indexer.case import Case, EngineRecord
from tests.support.faulty_engine import Bytes, Floats, engine_case
from tests.support.planted.fault import BOTH, LONG, ONLY_IDS, ONLY_SCORES, Planted

LARGE = {"scales": (0x60, 0x74)}
"""Scales of 32 to 192: products reach 1,152."""


class NibblesSwapped(Planted):
    name, family = "nibbles are swapped", "nibble order"

    def codes(self, page: Bytes) -> Bytes:
        return super().codes((page >> 4 | page << 4).astype(np.uint8))


class NibblesPlanar(Planted):
    name, family = "nibbles are planar", "nibble order"

    def codes(self, page: Bytes) -> Bytes:
        packed = page[:8192].reshape(128, 64)
        codes: Bytes = np.concatenate([packed & 15, packed >> 4], axis=1)
        return codes


class NibblesPlanarInGroups(Planted):
    name, family = "nibbles are planar in each group", "nibble order"

    def codes(self, page: Bytes) -> Bytes:
        packed = page[:8192].reshape(128, 8, 8)
        codes: Bytes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(128, 128)
        return codes


class ScalesInterleaved(Planted):
    name, family = "scales are read interleaved with codes", "scale order"

    def codes(self, page: Bytes) -> Bytes:
        rows = page.reshape(128, 72)[:, :64]
        return np.stack([rows & 15, rows >> 4], axis=2).reshape(128, 128)

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page.reshape(128, 72)[:, 64:], 16, axis=1)


class ScalesGroupMajor(Planted):
    name, family = "scales are read group-major", "scale order"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(8, 128).T, 16, axis=1)


class ScalesSwizzled(Planted):
    name, family = "scales are read swizzled", "scale order"

    def scales(self, page: Bytes) -> Bytes:
        tiles = page[8192:].reshape(2, 32, 4, 4)  # tile, row % 32, row // 32, column
        return np.repeat(tiles.transpose(2, 1, 0, 3).reshape(128, 8), 16, axis=1)


class ScalesFirst(Planted):
    name, family = "scales are read before the codes", "scale order"

    def codes(self, page: Bytes) -> Bytes:
        return super().codes(page[1024:])

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[:1024].reshape(128, 8), 16, axis=1)


class GroupsOf32(Planted):
    name, family = "groups have 32 dims", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(128, 8)[:, :4], 32, axis=1)


class NextGroup(Planted):
    name, family = "each group has the next group's scale", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(np.roll(page[8192:].reshape(128, 8), -1, axis=1), 16, axis=1)


class GroupBefore(Planted):
    name, family = "each group has the group's before", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(np.roll(page[8192:].reshape(128, 8), 1, axis=1), 16, axis=1)


class GroupsReversed(Planted):
    name, family = "groups are in reverse", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(128, 8)[:, ::-1], 16, axis=1)


class GroupPairs(Planted):
    name, family = "pairs of groups are exchanged", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].view("<u2").byteswap().view("u1").reshape(128, 8), 16, axis=1)


class GroupHalves(Planted):
    name, family = "halves of groups are exchanged", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(np.roll(page[8192:].reshape(128, 8), 4, axis=1), 16, axis=1)


class GroupsOf8(Planted):
    name, family = "groups have 8 dims", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.tile(np.repeat(page[8192:].reshape(128, 8), 8, axis=1), (1, 2))


class GroupsStrided(Planted):
    name, family = "groups are strided", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.tile(page[8192:].reshape(128, 8), (1, 16))


class OneScale(Planted):
    name, family = "one scale a token", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(128, 8)[:, :1], 128, axis=1)


class NextTokensScales(Planted):
    name, family = "each token has the next token's scales", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.roll(super().scales(page), -1, axis=0)


class PreviousTokensScales(Planted):
    name, family = "each token has the previous token's scales", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.roll(super().scales(page), 1, axis=0)


class Unsigned(Planted):
    name, family = "keys lose their sign", "sign"

    def keys(self, page: Bytes) -> Floats:
        return np.abs(super().keys(page))


class Negated(Planted):
    name, family = "keys have the other sign", "sign"

    def keys(self, page: Bytes) -> Floats:
        return -super().keys(page)


class SignInBit0(Planted):
    name, family = "the sign is taken from bit 0", "sign"

    def codes(self, page: Bytes) -> Bytes:
        codes = super().codes(page)
        return (codes // 2 + codes % 2 * 8).astype(np.uint8)


class ScaleSignLost(Planted):
    name, family = "the scale's sign is lost", "sign"

    @classmethod
    def made(cls) -> Case:
        case = engine_case()
        assert case.pages is not None
        pages = case.pages.copy()
        pages[:, 8192::3] |= 0x80
        return dataclasses.replace(case, pages=pages)

    def scales(self, page: Bytes) -> Bytes:
        return (super().scales(page) & 0x7F).astype(np.uint8)


class Unsaturated(Planted):
    name, family, options = "keys are not saturated at 448", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        small = super().cast(products / 4) * 4  # the same four significant bits, two octaves higher
        return np.where(np.abs(products) > 448, small, super().cast(products))


class KeptBeyond(Planted):
    name, family, options = "keys beyond 448 are kept as they are", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return np.where(np.abs(products) > 448, products, super().cast(products))


class OverflowToNaN(Planted):
    name, family, options = "keys beyond 448 become NaN", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return products.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


class OverflowToZero(Planted):
    name, family, options = "keys beyond 448 become 0", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return np.nan_to_num(products.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), nan=0.0)


class Unrounded(Planted):
    name, family, options = "keys are not rounded to E4M3", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return products


class Clamped(Planted):
    name, family, options = "keys are saturated, not rounded", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return products.clip(-448, 448)


class NaNScales(Planted):
    name, family = "NaN scales are not zero", "saturation and rounding"

    @classmethod
    def made(cls) -> Case:
        case = engine_case()
        assert case.pages is not None
        pages = case.pages.copy()
        pages[::2, 8192::301] = 0x7F
        pages[1::2, 8193::301] = 0xFF
        return dataclasses.replace(case, pages=pages)

    def values(self, codes: Floats, scales: Bytes) -> Floats:
        factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        factors[scales == 0x7F], factors[scales == 0xFF] = 480, -480
        return self.cast(codes * factors)


# Which page is read, and what it holds then.


class LogicalStride(Planted):
    name = "the block table's rows are taken to lie 14 entries apart"
    family = "block-table stride"

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table.reshape(-1)[request * 14 + block])


class RowZero(Planted):
    name, family = "the block table's rows are taken to lie 0 entries apart", "block-table stride"

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table[0, block])


class NextRow(Planted):
    name, family = "the next request's row of the block table is read", "block-table stride"
    options: ClassVar[dict[str, Any]] = {"lengths": [(900, 20), (1000, 10), (950, 5)]}

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table[(request + 1) % 3, block])


class ColumnMajor(Planted):
    name, family = "the block table is read column-major", "block-table stride"
    options: ClassVar[dict[str, Any]] = {"lengths": [(900, 20), (1000, 10), (950, 5)]}

    @classmethod
    def made(cls) -> Case:
        case = super().made()
        assert case.block_table is not None
        return dataclasses.replace(case, block_table=case.block_table[:, :8].copy())

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table.reshape(-1)[block * 3 + request])


class IdsOf8Bits(Planted):
    """Some of what is read instead lies outside the file."""

    name, family = "page ids are kept in 8 bits", "page id wrap"
    records = (BOTH, ONLY_SCORES)

    @classmethod
    def made(cls) -> Case:
        case = super().made()
        assert case.pages is not None
        ids = np.random.default_rng(3).choice(400, len(case.pages), replace=False).astype(np.int32)
        return dataclasses.replace(case, engine=EngineRecord(page_ids=ids))

    def page(self, request: int, block: int) -> Bytes:
        assert self.case.engine is not None
        assert self.case.engine.page_ids is not None
        held = self.case.engine.page_ids
        page_id = int(held[self.table[request, block]])
        (found,) = np.nonzero(held == page_id % 256)
        return self.at(int(found[0])) if len(found) else super().page(request, block)[::-1]


class Unwritten(Planted):
    name, family = "pages are read as unwritten", "stale or unwritten page"

    def page(self, request: int, block: int) -> Bytes:
        page = super().page(request, block)
        return np.zeros_like(page) if (request, block) in ((0, 3), (4, 2), (0, 11)) else page


class StalePage(Planted):
    name, family = "pages hold another block's keys", "stale or unwritten page"
    records = (BOTH, ONLY_SCORES)

    def page(self, request: int, block: int) -> Bytes:
        return super().page(*{(0, 3): (4, 1), (2, 5): (2, 6)}.get((request, block), (request, block)))


class UnknownPage(Planted):
    name, family = "pages held something else", "stale or unwritten page"
    records = (BOTH, ONLY_SCORES)

    def page(self, request: int, block: int) -> Bytes:
        page = super().page(request, block)
        return page[::-1] if (request, block) in ((0, 3), (2, 5)) else page


class StalePageByIds(Planted):
    name, family = "pages hold another block's keys", "stale or unwritten page"
    options: ClassVar[dict[str, Any]] = {"lengths": [(1700, 60), (700, 20)]}
    records = (ONLY_IDS,)

    def page(self, request: int, block: int) -> Bytes:
        return super().page(*((1, 3) if (request, block) == (0, 3) else (request, block)))


class UnknownPageByIds(Planted):
    name, family = "pages held something else", "stale or unwritten page"
    options: ClassVar[dict[str, Any]] = {"lengths": [(1700, 60), (700, 20)]}
    records = (ONLY_IDS,)

    def page(self, request: int, block: int) -> Bytes:
        page = super().page(request, block)
        return page[::-1] if (request, block) == (0, 3) else page


class StepNotWritten(Planted):
    name, family = "this step's keys are not yet written, zeros are read", "stale or unwritten page"
    options: ClassVar[dict[str, Any]] = LONG
    records = (BOTH, ONLY_SCORES)

    def present(self, products: Floats, request: int) -> Floats:
        prefix = int(self.case.seq_lens[request] - self.case.query_lens[request])
        return np.where(np.arange(len(products)) >= prefix, np.minimum(products, 0) * 0, products)


class StepLeftOut(Planted):
    name, family = "this step's keys are left out", "stale or unwritten page"
    options: ClassVar[dict[str, Any]] = LONG
    records = (BOTH, ONLY_SCORES)

    def present(self, products: Floats, request: int) -> Floats:
        prefix = int(self.case.seq_lens[request] - self.case.query_lens[request])
        return np.where(np.arange(len(products)) >= prefix, -np.inf, products)


class GarbageTail(StepNotWritten):
    """Behind a request's last key lie the largest keys that there are: they are read by nobody."""

    options: ClassVar[dict[str, Any]] = {"scales": (0x08, 0x18)}

    @classmethod
    def made(cls) -> Case:
        case = super().made()
        assert case.pages is not None
        assert case.block_table is not None
        pages = case.pages.copy()
        for request, seq_len in enumerate(case.seq_lens.tolist()):
            page = pages[case.block_table[request, (seq_len - 1) // 128]]
            end = (seq_len - 1) % 128 + 1
            page[end * 64 : 8192], page[8192 + end * 8 :] = 0x77, 0x7E
        return dataclasses.replace(case, pages=pages)
