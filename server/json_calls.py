"""Small calls as JSON: the tensors of the binary forms as nested lists of numbers."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from indexer.case import Case
from indexer.case.container import Array
from indexer.wire import KeysBody, SequencesCall
from kernel.contract import HEAD_DIM
from server.problems import invalid

_Model = TypeVar("_Model", bound="_StrictModel")
_Queries = list[list[list[float]]]
_Keys = list[list[float]]
_INT32 = 2**31 - 1


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CaseJson(_StrictModel):
    """One scoring call. Several requests: their queries and keys one after another, and their lengths."""

    index_q: _Queries = Field(description="`[total_q, H, 128]`, H 1, 2 or 4; cast to E4M3, saturating.")
    index_k: _Keys = Field(description="`[total_k, 128]`; quantised to NVFP4.")
    seq_lens: list[int] | None = Field(
        default=None, description="`[batch]` keys of each request; left out: one request has all."
    )
    cu_seqlens_q: list[int] | None = Field(
        default=None,
        description="`[batch + 1]` exclusive prefix sum of the query lengths; left out: one request.",
    )
    init_blocks: int = Field(default=0, ge=0, le=10**9 - 1, description="Blocks forced at a row's start.")
    local_blocks: int = Field(default=1, ge=0, le=10**9 - 1, description="Blocks forced at a row's end.")
    topk: int = Field(default=16, ge=1, le=64, description="Blocks a row selects.")


class KeysJson(_StrictModel):
    """Keys to append."""

    index_k: _Keys = Field(description="`[n, 128]`; quantised to NVFP4.")


class SequencesJson(_StrictModel):
    """Queries for the last positions of some sequences."""

    sequences: list[str] = Field(description="Ids, in the order of their rows in `index_q`.")
    index_q: _Queries = Field(description="`[total_q, H, 128]`; cast to E4M3, saturating.")
    query_lens: list[int] | None = Field(
        default=None, description="Queries of each sequence; left out: one each, or all of the only one."
    )


def case_of_json(body: bytearray) -> Case:
    """Read a call.

    Raises:
        ProblemError: 422, naming the member.
        CaseFileError: the case is outside the contract.
    """
    given = _parsed(CaseJson, body)
    index_q = _array("index_q", given.index_q, (-1, 1, HEAD_DIM))
    index_k = _array("index_k", given.index_k, (-1, HEAD_DIM))
    return Case(
        index_q=index_q,
        index_k=index_k,
        seq_lens=_integers("seq_lens", [len(given.index_k)] if given.seq_lens is None else given.seq_lens),
        cu_seqlens_q=_integers(
            "cu_seqlens_q", [0, len(given.index_q)] if given.cu_seqlens_q is None else given.cu_seqlens_q
        ),
        init_blocks=given.init_blocks,
        local_blocks=given.local_blocks,
        topk=given.topk,
    )


def keys_of_json(body: bytearray) -> KeysBody:
    """Read keys.

    Raises:
        ProblemError: 422, naming the member.
    """
    return KeysBody(_array("index_k", _parsed(KeysJson, body).index_k, (-1, HEAD_DIM)))


def sequences_call_of_json(body: bytearray, num_heads: int) -> SequencesCall:
    """Read a call on sequences. Lists without a query do not tell the heads, which are then ``num_heads``.

    Raises:
        ProblemError: 422, naming the member.
    """
    given = _parsed(SequencesJson, body)
    query_lens = None if given.query_lens is None else tuple(given.query_lens)
    index_q = _array("index_q", given.index_q, (-1, num_heads, HEAD_DIM))
    return SequencesCall(index_q, tuple(given.sequences), query_lens)


def argument_name(location: tuple[int | str, ...]) -> str:
    """``("index_q", 0, 1)`` as ``index_q[0, 1]``."""
    name = ".".join(part for part in location if isinstance(part, str))
    places = [str(part) for part in location if isinstance(part, int)]
    return f"{name}[{', '.join(places)}]" if places else name or "body"


def _parsed(model: type[_Model], body: bytearray) -> _Model:
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=True)[0]
        argument = argument_name(first["loc"])
        raise invalid(argument, _value_of(first), first["msg"], "see /openapi.json") from error


def _value_of(error: ErrorDetails) -> str:
    """The value that is at fault, for a message."""
    given = error["input"]
    if error["type"] == "missing":  # the input is what should hold it
        return "not given"
    return ascii(given)[:100] if isinstance(given, (int, float, str)) else type(given).__name__


def _array(name: str, values: list[Any], empty: tuple[int, ...]) -> Array:
    """The lists as float32, of the shape that ``empty`` says (-1: none) when they hold nothing."""
    if not values:
        return np.zeros([max(size, 0) for size in empty], dtype=np.float32)
    try:
        with np.errstate(over="ignore"):  # an infinity is refused by name where finiteness is checked
            return np.array(values, dtype=np.float32)
    except ValueError as error:
        raise invalid(name, "lists", "must have lists of one length", "make them a full tensor") from error


def _integers(name: str, values: list[int]) -> Array:
    for place, value in enumerate(values):
        if not -_INT32 <= value <= _INT32:
            raise invalid(f"{name}[{place}]", str(value)[:40], "must fit 32 bits", "correct it")
    return np.array(values, dtype=np.int32)
