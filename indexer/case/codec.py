"""Case files: a :class:`Case` to and from a safetensors container."""

from __future__ import annotations

import mmap
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from indexer.case.atomic import save_atomically
from indexer.case.case import Case
from indexer.case.container import Array, Buffer, Container, decode_container, refuse, shown
from indexer.case.encoder import encode_container
from kernel.errors import CaseFileError

FORMAT = "nvfp4-indexer-case"
"""The metadata field ``format`` of every case file."""
VERSION = "1"
"""The version of the format that is written and read."""
REQUIRED_TENSORS = ("index_q", "cu_seqlens_q", "seq_lens")
OPTIONAL_TENSORS = ("index_k", "pages", "block_table", "expected_scores", "expected_block_ids")
INT_FIELDS = ("init_blocks", "local_blocks", "topk")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def decode_case(body: Buffer) -> Case:
    """Read a case from memory. Its arrays are views of ``body``, read-only where ``body`` is.

    Raises:
        CaseFileError: naming the tensor or metadata field, its value, the limit and the remedy.
    """
    return _case(decode_container(body))


def encode_case(case: Case) -> bytes:
    """The case as the bytes of a case file."""
    return b"".join(encode_container(_tensors(case), _metadata(case)))


def read_case(path: str | os.PathLike[str]) -> Case:
    """Read a case file. Its arrays are views of the mapped file, so a page that is not used is not read.

    The mapping is private: writing to an array changes no file. The file must not be cut short while the
    case is in use (the operating system ends a process that reads past the end of a mapped file).

    Raises:
        CaseFileError: as :func:`decode_case`, and for a path that cannot be read or is not a regular file.
    """
    name = os.fspath(path)
    try:
        body = _mapped(Path(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CaseFileError("path", shown(name), reason, "pass a case file that can be read") from error
    try:
        return decode_case(body)
    except CaseFileError as error:
        raise error.in_file(name) from None


def write_case(case: Case, path: str | os.PathLike[str]) -> None:
    """Write a case file, whole or not at all.

    Raises:
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    save_atomically(_tensors(case), _metadata(case), path)


def _mapped(path: Path) -> Buffer:
    # O_NONBLOCK: opening a pipe that nobody writes to must not hang.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("must be a regular file")
        return _map(file, status.st_size)


def _map(file: BinaryIO, size: int) -> Buffer:
    if size == 0:  # an empty file cannot be mapped
        return b""
    return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def _case(container: Container) -> Case:
    tensors, metadata = container.tensors, container.metadata
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(name) != wanted:
            refuse(f"metadata {name}", shown(metadata.get(name)), f"must be {wanted!r}", "pass a case file")
    for name in metadata:
        if name not in ("format", "version", "source", *INT_FIELDS):
            refuse("metadata", shown(name), "must be a field of the format", "put remarks into source")
    for name in tensors:
        if name not in REQUIRED_TENSORS + OPTIONAL_TENSORS:
            known = ", ".join(REQUIRED_TENSORS + OPTIONAL_TENSORS)
            refuse("tensor", shown(name), f"must be one of {known}", "leave it out")
    for name in REQUIRED_TENSORS:
        if name not in tensors:
            refuse(name, "missing", "must be in the file", "write that tensor")
    return Case(
        index_q=tensors["index_q"],
        cu_seqlens_q=tensors["cu_seqlens_q"],
        seq_lens=tensors["seq_lens"],
        index_k=tensors.get("index_k"),
        pages=tensors.get("pages"),
        block_table=tensors.get("block_table"),
        expected_scores=tensors.get("expected_scores"),
        expected_block_ids=tensors.get("expected_block_ids"),
        init_blocks=_integer("init_blocks", metadata.get("init_blocks")),
        local_blocks=_integer("local_blocks", metadata.get("local_blocks")),
        topk=_integer("topk", metadata.get("topk")),
        source=metadata.get("source", ""),
    )


def _integer(name: str, text: str | None) -> int:
    if text is None or not _DECIMAL.fullmatch(text):
        refuse(
            f"metadata {name}", shown(text), "must be a decimal number of up to 9 digits", "write it like 16"
        )
    return int(text)


def _tensors(case: Case) -> dict[str, Array]:
    arrays = {name: getattr(case, name) for name in REQUIRED_TENSORS + OPTIONAL_TENSORS}
    return {name: array for name, array in arrays.items() if array is not None}


def _metadata(case: Case) -> dict[str, str]:
    integers = {name: str(getattr(case, name)) for name in INT_FIELDS}
    return {"format": FORMAT, "version": VERSION, "source": case.source, **integers}
