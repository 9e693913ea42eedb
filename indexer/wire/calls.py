"""Bodies of the calls that work on a server's sequences: keys to append, and queries to score.

A keys body holds one tensor ``index_k``. A sequences body holds ``index_q``, optionally ``query_lens``, and
the metadata field ``sequences``: the ids, separated by commas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from indexer.case.container import Array, Buffer, Container, decode_container, refuse, shown
from indexer.case.encoder import encode_container
from kernel.contract import HEAD_DIM


@dataclass(frozen=True, eq=False)
class KeysBody:
    """Keys to append.

    Attributes:
        index_k: ``[n, 128]`` bfloat16, float16 or float32.
    """

    index_k: Array


@dataclass(frozen=True, eq=False)
class SequencesCall:
    """Queries for the last positions of some sequences.

    Attributes:
        index_q: ``[total_q, H, 128]`` bfloat16, float16, float32 or float8_e4m3fn.
        sequences: ids of the sequences, in the order of their rows in ``index_q``.
        query_lens: queries of each sequence. None: all rows belong to the only sequence, or each of several
            sequences has one.
    """

    index_q: Array
    sequences: tuple[str, ...]
    query_lens: tuple[int, ...] | None = None


def encode_keys(index_k: Array) -> list[Buffer]:
    """A keys body as buffers to be sent one after another."""
    return encode_container({"index_k": index_k}, {})


def decode_keys(body: Buffer) -> KeysBody:
    """Read a keys body. Its array is a view of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    _check_names(container, {"index_k"}, (), set())
    index_k = container.tensors["index_k"]
    if index_k.ndim != 2 or index_k.shape[1] != HEAD_DIM:
        refuse("index_k.shape", list(index_k.shape), f"must be [any, {HEAD_DIM}]", "write one key a row")
    return KeysBody(index_k)


def encode_sequences_call(call: SequencesCall) -> list[Buffer]:
    """A sequences body as buffers to be sent one after another."""
    tensors = {"index_q": call.index_q}
    if call.query_lens is not None:
        tensors["query_lens"] = np.asarray(call.query_lens, dtype="<i4")
    return encode_container(tensors, {"sequences": ",".join(call.sequences)})


def decode_sequences_call(body: Buffer) -> SequencesCall:
    """Read a sequences body. Its ``index_q`` is a view of ``body``.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    container = decode_container(body)
    _check_names(container, {"index_q"}, ("query_lens",), {"sequences"})
    index_q, query_lens = container.tensors["index_q"], container.tensors.get("query_lens")
    if index_q.ndim != 3 or index_q.shape[2] != HEAD_DIM:
        refuse("index_q.shape", list(index_q.shape), f"must be [any, H, {HEAD_DIM}]", "reshape it")
    names = container.metadata["sequences"]
    sequences = tuple(names.split(",")) if names else ()
    if query_lens is None:
        return SequencesCall(index_q, sequences)
    if query_lens.dtype != np.dtype("<i4") or query_lens.shape != (len(sequences),):
        limit = f"must be I32 [{len(sequences)}], one length for each sequence"
        refuse("query_lens", f"{query_lens.dtype} {list(query_lens.shape)}", limit, "write them so")
    return SequencesCall(index_q, sequences, tuple(query_lens.tolist()))


def _check_names(
    container: Container, tensors: set[str], optional: Sequence[str], fields: Collection[str]
) -> None:
    for name in sorted(tensors - container.tensors.keys()):
        refuse(name, "missing", "must be in the body", "write it")
    for name in container.tensors:
        if name not in tensors and name not in optional:
            known = ", ".join((*tensors, *optional))
            refuse("tensor", shown(name), f"must be one of {known}", "leave it out")
    for name in sorted(set(fields) - container.metadata.keys()):
        refuse(f"metadata {name}", "missing", "must be in the body", "write it")
    for name in container.metadata:
        if name not in fields:
            refuse("metadata", shown(name), "must be a field of this body", "leave it out")
