"""Selection in pieces of bounded memory: every row once, and the ids that the oracle gives."""

from __future__ import annotations

import pytest
import torch

from kernel.backends import registry
from kernel.backends.base import Order
from kernel.backends.flydsl import backend as pieces_module
from kernel.backends.flydsl.backend import pieces
from kernel.backends.reference import ReferenceBackend
from tests.support.calls import RAGGED, random_call
from tests.support.compare import assert_same_bits


@pytest.mark.parametrize("order", ["score", "block"])
def test_of_the_kernels_scores_equals_the_oracles(order: Order) -> None:
    """A context of 69 blocks, where k = 2 goes through maxima, beside a short request."""
    call = random_call([(8720, 5), (300, 3), (0, 0)], 4, seed=21).forcing(0, 1)
    batch = call.batch()
    expected = torch.full((4, 8, 2), -7, dtype=torch.int32)
    ReferenceBackend().select(batch, expected, order)
    found = torch.full_like(expected, -7)
    registry.create("flydsl-sim").select(batch, found, order)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("cells", [1, 100, 2000, 1 << 20])
def test_pieces_cover_every_row_once(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """Within the memory, or one query at a time; rows of requests left out are in no piece."""
    monkeypatch.setattr(pieces_module, "_CELLS", cells)
    batch = random_call(RAGGED, 4).batch()
    batch = batch.subset(request for request in batch.requests if request.table_row != 3)
    rows = torch.zeros(batch.total_q, dtype=torch.int32)
    for piece_rows, piece in pieces(batch):
        rows[piece_rows] += 1
        assert piece.total_q == piece_rows.stop - piece_rows.start
        assert piece.total_q == 1 or 4 * piece.total_q * piece.num_score_blocks <= cells
        assert_same_bits(piece.num_blocks_per_query(), batch.num_blocks_per_query()[piece_rows])
    expected = torch.zeros_like(rows)
    for request in batch.requests:
        expected[request.query_start : request.query_start + request.query_len] = 1
    assert_same_bits(rows, expected)
