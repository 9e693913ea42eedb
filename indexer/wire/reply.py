"""The answer to a scoring call: what was selected, by which scores, and how long each stage took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from indexer.case.container import Array, Buffer, decode_container, shown
from indexer.case.encoder import encode_container
from kernel.errors import CaseFileError

FORMAT = "nvfp4-indexer-scores"
"""The metadata field ``format`` of a reply."""
VERSION = "1"


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreReply:
    """Selected blocks of every row, in numpy.

    Attributes:
        block_ids: ``[H, total_q, k]`` int32, logical blocks of the row's request; -1 where a row has fewer.
        num_blocks: ``[total_q]`` int32, the causal blocks ``nb`` of each query token.
        scores: ``[H, total_q, S]`` float32, ``-inf`` at and past a row's ``nb``; None when not asked for.
        backend: name of the backend that ran.
        precision: its precision, ``exact`` or ``fast``.
        order: order of the block ids, ``score`` or ``block``.
        timings: seconds of each stage, in order.
    """

    block_ids: Array
    num_blocks: Array
    scores: Array | None
    backend: str
    precision: str
    order: str
    timings: Mapping[str, float] = field(default_factory=dict)


def encode_reply(reply: ScoreReply) -> list[Buffer]:
    """A reply as buffers to be sent one after another; its arrays are not copied."""
    tensors = {"block_ids": reply.block_ids, "num_blocks": reply.num_blocks}
    if reply.scores is not None:
        tensors["scores"] = reply.scores
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "backend": reply.backend,
        "precision": reply.precision,
        "order": reply.order,
        "timings_seconds": json.dumps({name: round(value, 9) for name, value in reply.timings.items()}),
    }
    return encode_container(tensors, metadata)


def decode_reply(body: Buffer) -> ScoreReply:
    """Read a reply from memory. Its arrays are views of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    tensors, metadata = container.tensors, container.metadata
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(name) != wanted:
            _refuse(f"metadata {name}", shown(metadata.get(name)), f"must be {wanted!r}")
    block_ids = _tensor(tensors, "block_ids", np.dtype("<i4"), 3)
    num_blocks = _tensor(tensors, "num_blocks", np.dtype("<i4"), 1)
    scores = _tensor(tensors, "scores", np.dtype("<f4"), 3) if "scores" in tensors else None
    rows = block_ids.shape[:2]
    if num_blocks.shape != rows[1:]:
        _refuse("num_blocks.shape", list(num_blocks.shape), f"must be [{rows[1]}], the tokens of block_ids")
    if scores is not None and scores.shape[:2] != rows:
        _refuse("scores.shape", list(scores.shape), f"must start with {list(rows)}, the rows of block_ids")
    return ScoreReply(
        block_ids=block_ids,
        num_blocks=num_blocks,
        scores=scores,
        backend=metadata.get("backend", ""),
        precision=metadata.get("precision", ""),
        order=metadata.get("order", ""),
        timings=_timings(metadata.get("timings_seconds", "{}")),
    )


def _tensor(tensors: Mapping[str, Array], name: str, dtype: np.dtype[np.generic], dims: int) -> Array:
    array = tensors.get(name)
    if array is None:
        _refuse(name, "missing", "must be in the reply")
    if array.dtype != dtype or array.ndim != dims:
        _refuse(name, f"{array.dtype} {list(array.shape)}", f"must be {dtype} of {dims} dimensions")
    return array


def _timings(text: str) -> dict[str, float]:
    try:
        timings = json.loads(text)
    except (ValueError, RecursionError):
        timings = None
    if not isinstance(timings, dict) or not all(type(value) in (int, float) for value in timings.values()):
        _refuse("metadata timings_seconds", shown(text), "must be a JSON object of numbers")
    return {name: float(value) for name, value in timings.items()}


def _refuse(argument: str, value: object, limit: str) -> NoReturn:
    raise CaseFileError(argument, value, limit, "ask a server of the same version")
