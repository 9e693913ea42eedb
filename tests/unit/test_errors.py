"""Every error survives a copy and another process, and those about an argument name it in the same way."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

import client.errors  # noqa: F401
import kernel.gfx950.hip
import kernel.gfx950.report.prefill  # noqa: F401  so that their classes are walked
from indexer import IndexerConfig
from kernel.errors import (
    ArgumentError,
    CaseFileError,
    IndexerError,
    InvalidArgumentError,
    OutOfPagesError,
    UnknownSequenceError,
)
from tests.support.process import forkserver

ARGUMENTS: dict[str, object] = {
    "str": "text",
    "int": 7,
    "int | None": 8,
    "object": 2.5,
    "str | None": "file.safetensors",
    "tuple[str, ...]": ("cpu", "reference"),
    "tuple[int, ...]": (0, 3),
}
"""A value of each type that an error's constructor takes."""


def every_error(base: type[IndexerError] = IndexerError) -> list[type[IndexerError]]:
    return [base, *(error for child in base.__subclasses__() for error in every_error(child))]


def made(error_type: type[IndexerError]) -> IndexerError:
    if not inspect.isfunction(error_type.__init__):  # Python's own
        return error_type("message")
    parameters = list(inspect.signature(error_type).parameters.values())
    by_name = {p.name: ARGUMENTS[p.annotation] for p in parameters if p.kind is p.KEYWORD_ONLY}
    return error_type(
        *(ARGUMENTS[p.annotation] for p in parameters if p.kind is not p.KEYWORD_ONLY), **by_name
    )


COPIES: dict[str, Callable[[IndexerError], IndexerError]] = {
    **{
        f"pickle {protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))  # type: ignore[misc]  # noqa: S301
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "twice": lambda error: copy.copy(copy.copy(error)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("error_type", every_error())
def test_every_error_can_be_copied(
    error_type: type[IndexerError], copied: Callable[[IndexerError], IndexerError]
) -> None:
    error = made(error_type)
    same = copied(error)
    assert type(same) is error_type
    assert str(same) == str(error)
    assert (same.args, vars(same)) == (error.args, vars(error))


@pytest.mark.parametrize("error_type", every_error(ArgumentError))
def test_an_error_about_an_argument_names_it_with_value_limit_and_remedy(
    error_type: type[ArgumentError],
) -> None:
    error = made(error_type)
    assert isinstance(error, ArgumentError)
    assert str(error).endswith(f"{error.argument} = {error.value}: {error.limit}; {error.remedy}")


def test_which_errors_are_value_errors() -> None:
    """What is outside the contract is; that a resource is short is not."""
    for error_type in (InvalidArgumentError, CaseFileError, UnknownSequenceError):
        assert issubclass(error_type, ValueError)
    assert issubclass(UnknownSequenceError, KeyError)
    assert not issubclass(OutOfPagesError, ValueError)


def refused_config() -> IndexerConfig:
    return IndexerConfig(3, 1)


def test_a_refusal_comes_back_from_a_process_of_a_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=forkserver()) as pool:
        refusal = pool.submit(refused_config).exception(timeout=120)
        assert isinstance(refusal, InvalidArgumentError)
        assert str(refusal).startswith("num_index_heads = 3: must be one of")
