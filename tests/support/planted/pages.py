"""Which page is read, and what it holds then."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from indexer.case import Case, EngineRecord
from tests.support.faulty_engine import Bytes, Floats
from tests.support.planted.fault import BOTH, LONG, ONLY_IDS, ONLY_SCORES, Planted


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
