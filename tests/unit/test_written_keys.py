"""Keys of a step against the bytes that an engine wrote for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from indexer.explain.engine import check_written
from kernel.backends.reference import ReferenceBackend
from tests.support.faulty_engine import engine_case

Pages = NDArray[np.uint8]


def written_case(change: Callable[[Pages], Pages]) -> Case:
    """A case whose last keys were inserted by the oracle, its pages then changed."""
    case = engine_case()
    assert case.pages is not None
    assert case.block_table is not None
    random = np.random.default_rng(3)
    keys = random.normal(size=(case.total_q, 128)).astype(ml_dtypes.bfloat16)
    keys[5] *= 3000  # saturates, and a group of zeros
    keys[6, :16] = 0
    slots = []
    for request in range(case.batch):
        seq_len, queries = int(case.seq_lens[request]), int(case.query_lens[request])
        for position in range(seq_len - queries, seq_len):
            slots.append(int(case.block_table[request, position // 128]) * 128 + position % 128)
    pages = torch.from_numpy(case.pages.copy())
    ReferenceBackend().insert(torch.from_numpy(keys.astype(np.float32)), pages, torch.tensor(slots))
    written = change(pages.numpy().copy())
    return dataclasses.replace(case, pages=written, engine=EngineRecord(new_keys=keys))


def interleave(pages: Pages) -> Pages:
    codes, scales = pages[:, :8192].reshape(-1, 128, 64), pages[:, 8192:].reshape(-1, 128, 8)
    return np.concatenate([codes, scales], axis=2).reshape(pages.shape)


def swap(pages: Pages) -> Pages:
    pages[:, :8192] = pages[:, :8192] >> 4 | pages[:, :8192] << 4
    return pages


def group_major(pages: Pages) -> Pages:
    pages[:, 8192:] = pages[:, 8192:].reshape(-1, 128, 8).swapaxes(1, 2).reshape(-1, 1024)
    return pages


def negate(pages: Pages) -> Pages:
    pages[:, :8192] ^= 0x88
    return pages


def test_right_keys_are_right() -> None:
    case = written_case(lambda pages: pages)
    found = check_written(case)
    assert found is not None
    assert (found.tokens, found.wrong, found.worst_position, found.cause) == (case.total_q, 0, -1, None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (interleave, "scales are written interleaved with codes"),
        (swap, "nibbles are written swapped"),
        (group_major, "scales are written group-major"),
        (negate, "keys are written with the other sign"),
        (np.zeros_like, "keys are not written"),
    ],
)
def test_a_wrong_writer_is_named(change: Callable[[Pages], Pages], name: str) -> None:
    found = check_written(written_case(change))
    assert found is not None
    assert found.wrong > 0.9 * found.tokens
    assert (found.worst_request, found.worst_position) == (0, 1670)
    assert found.cause is not None
    assert found.cause.name == name


def test_one_wrong_token_is_found_and_has_no_cause() -> None:
    def damage(pages: Pages) -> Pages:
        page = int(table[2, 1099 // 128])
        pages[page, 1099 % 128 * 64 + 7] ^= 1
        return pages

    table = np.asarray(engine_case().block_table)
    found = check_written(written_case(damage))
    assert found is not None
    assert (found.wrong, found.worst_request, found.worst_position, found.cause) == (1, 2, 1099, None)


def test_without_keys_or_pages_there_is_nothing_to_compare() -> None:
    assert check_written(engine_case()) is None
