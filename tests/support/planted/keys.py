"""How a page becomes keys."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from indexer.case import Case
from tests.support.faulty_engine import Bytes, Floats, engine_case
from tests.support.planted.fault import Planted

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
