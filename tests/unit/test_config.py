"""A configuration outside the limits is refused by its field's name, and so is a scorer that cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from indexer import BackendUnavailableError, IndexerConfig, IndexScorer, InvalidArgumentError

CONFIGS: list[tuple[str, Any, str]] = [
    *(("num_index_heads", value, "must be one of (1, 2, 4)") for value in (0, 3, 8, -1)),
    *(("num_index_heads", value, "must be an int") for value in ("4", True, 4.0, None)),
    *(("num_pages", value, "must be an int, 0 or more") for value in (-1, True, 1.5, "8", None)),
    *(("topk_blocks", value, "must be 1 to 64") for value in (0, 65, -1)),
    ("topk_blocks", 16.0, "must be an int"),
    *(("init_blocks", value, "must be 0 or more") for value in (-1, -(2**40))),
    ("init_blocks", None, "must be an int"),
    ("local_blocks", -1, "must be 0 or more"),
    ("local_blocks", False, "must be an int"),
    ("order", "token", "must be 'score' or 'block'"),
    ("backend", "cuda", "no such backend; use one of auto, "),
    ("backend", None, "no such backend"),
    *(("device", value, "must be a torch device") for value in (0, "tpu:0", "", "cpu:")),
    ("precision", "exactly", "must be 'exact' or 'fast'"),
]


@pytest.mark.parametrize(("field", "value", "limit"), CONFIGS)
def test_a_config_is_checked_when_it_is_made(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        IndexerConfig(**{"num_index_heads": 4, "num_pages": 8, field: value})
    assert caught.value.argument == field
    assert limit in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"num_pages": 2**40}, "num_pages"),
        ({"num_pages": 2**70}, "num_pages"),
        ({"device": "meta"}, "device"),
    ],
)
def test_a_scorer_that_cannot_be_is_refused_by_name(changed: dict[str, Any], argument: str) -> None:
    config = IndexerConfig(**{"num_index_heads": 4, "num_pages": 8, "backend": "cpu", **changed})
    with pytest.raises((InvalidArgumentError, BackendUnavailableError)) as caught:
        IndexScorer(config)
    assert str(caught.value).startswith(f"{argument} = ")


def test_a_scorer_needs_a_config() -> None:
    with pytest.raises(InvalidArgumentError, match="config = dict: must be an IndexerConfig"):
        IndexScorer({"num_index_heads": 4})  # type: ignore[arg-type]


def test_integers_of_numpy_are_kept_as_python_s() -> None:
    integers: list[Any] = [np.int64(4), np.int32(8), np.uint8(16), np.int8(0), np.int16(1)]
    config = IndexerConfig(*integers)
    assert config == IndexerConfig(4, 8, 16, 0, 1)
    fields = (config.num_index_heads, config.num_pages, config.topk_blocks, config.init_blocks)
    assert [type(value) for value in fields] == [int] * 4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0), None])
def test_a_device_may_be_named_in_any_way_of_torch_s(device: str | torch.device | None, backend: str) -> None:
    config = IndexerConfig(4, 8, backend=backend, device=device)
    assert config.device == (None if device is None else "cpu")
    assert IndexScorer(config).device == torch.device("cpu")
