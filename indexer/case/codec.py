"""Reads and writes case files: a :class:`Case` to and from a safetensors container."""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import cast, get_args

from indexer.case.case import Case, EngineOrder, EngineRecord
from indexer.case.container import Array, Buffer, Container, decode_container, encode_container, refuse, shown
from kernel.contract import PAGE_BYTES
from kernel.errors import CaseFileError

# ---- Writing a file, whole or not at all ----

NAME_CHARS = 32
"""Characters of the file's name in that of its unfinished copy, which must not grow too long."""


def write_atomically(buffers: Iterable[Buffer], path: str | os.PathLike[str]) -> None:
    """Write a file by renaming a finished one, so that no reader ever sees a part of it.

    A symbolic link stays, and what it points at is written. A FIFO or a character device stays, too: it is
    written into, and waited for, as a shell's ``>`` does.

    Raises:
        OSError: it cannot be written; an older file of that name is left as it was.
    """
    mode = _mode(path)
    if mode is None or stat.S_ISREG(mode):
        _replace(Path(os.path.realpath(path)), buffers, 0o666 & ~_umask() if mode is None else mode & 0o777)
    elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
            file.writelines(buffers)
    elif stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    else:
        raise OSError(errno.EINVAL, "Not a file, a FIFO or a character device", os.fspath(path))


def _mode(path: str | os.PathLike[str]) -> int | None:
    """Of what the path leads to; None if nothing is there."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None


def _replace(target: Path, buffers: Iterable[Buffer], permissions: int) -> None:
    # A name of its own: two writers of one file must not meet in the unfinished copy.
    prefix = f".{target.name[:NAME_CHARS]}."
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(buffers)
        part.chmod(permissions)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return mask


# ---- The case ----

FORMAT = "nvfp4-indexer-case"
"""The metadata field ``format`` of every case file."""
VERSION = "1"
"""The version of the format that is written and read."""
REQUIRED_TENSORS = ("index_q", "cu_seqlens_q", "seq_lens")
OPTIONAL_TENSORS = ("index_k", "pages", "block_table", "expected_scores", "expected_block_ids")
ENGINE_TENSORS = ("engine_block_ids", "engine_scores", "page_ids", "new_keys")
"""Optional tensors of an engine's result."""
ENGINE_FIELDS = ("engine_order", "page_stride", "layer")
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
    return b"".join(case_buffers(case))


def case_buffers(case: Case) -> list[Buffer]:
    """The case as buffers to be sent one after another; its arrays are not copied."""
    return encode_container(_tensors(case), _metadata(case))


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
    write_atomically(case_buffers(case), path)


def _mapped(path: Path) -> Buffer:
    # O_NONBLOCK: opening a pipe that nobody writes to must not hang.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("must be a regular file")
        if status.st_size == 0:  # an empty file cannot be mapped
            return b""
        return memoryview(mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_COPY))


def _case(container: Container) -> Case:
    tensors, metadata = container.tensors, container.metadata
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(name) != wanted:
            refuse(f"metadata {name}", shown(metadata.get(name)), f"must be {wanted!r}", "pass a case file")
    for name in metadata:
        if name not in ("format", "version", "source", *INT_FIELDS, *ENGINE_FIELDS):
            refuse("metadata", shown(name), "must be a field of the format", "put remarks into source")
    known_tensors = REQUIRED_TENSORS + OPTIONAL_TENSORS + ENGINE_TENSORS
    for name in tensors:
        if name not in known_tensors:
            known = ", ".join(known_tensors)
            refuse("tensor", shown(name), f"must be one of {known}", "leave it out")
    for name in REQUIRED_TENSORS:
        if name not in tensors:
            refuse(name, "missing", "must be in the file", "write that tensor")
    return Case(
        **{name: tensors.get(name) for name in REQUIRED_TENSORS + OPTIONAL_TENSORS},  # type: ignore[arg-type]
        **{name: _integer(name, metadata.get(name)) for name in INT_FIELDS},  # type: ignore[arg-type]
        source=metadata.get("source", ""),
        engine=_engine(container),
    )


def _engine(container: Container) -> EngineRecord | None:
    tensors, metadata = container.tensors, container.metadata
    if tensors.keys().isdisjoint(ENGINE_TENSORS) and metadata.keys().isdisjoint(ENGINE_FIELDS):
        return None
    order = metadata.get("engine_order", "any")
    if order not in get_args(EngineOrder):
        refuse("metadata engine_order", shown(order), "must be score, block or any", "write one of them")
    return EngineRecord(
        block_ids=tensors.get("engine_block_ids"),
        scores=tensors.get("engine_scores"),
        order=cast("EngineOrder", order),
        page_ids=tensors.get("page_ids"),
        page_stride=_integer("page_stride", metadata.get("page_stride", str(PAGE_BYTES))),
        new_keys=tensors.get("new_keys"),
        layer=_integer("layer", metadata["layer"]) if "layer" in metadata else None,
    )


def _integer(name: str, text: str | None) -> int:
    if text is None or not _DECIMAL.fullmatch(text):
        limit = "must be a decimal number of up to 9 digits"
        refuse(f"metadata {name}", shown(text), limit, "write it like 16")
    return int(text)


def _tensors(case: Case) -> dict[str, Array]:
    # Pages first: a mapped file's are then aligned as scoring wants them, and need not be copied.
    names = ("pages", *REQUIRED_TENSORS, *(name for name in OPTIONAL_TENSORS if name != "pages"))
    arrays: dict[str, Array | None] = {name: getattr(case, name) for name in names}
    if case.engine is not None:
        arrays |= {
            "engine_block_ids": case.engine.block_ids,
            "engine_scores": case.engine.scores,
            "page_ids": case.engine.page_ids,
            "new_keys": case.engine.new_keys,
        }
    return {name: array for name, array in arrays.items() if array is not None}


def _metadata(case: Case) -> dict[str, str]:
    integers = {name: str(getattr(case, name)) for name in INT_FIELDS}
    metadata = {"format": FORMAT, "version": VERSION, "source": case.source, **integers}
    if case.engine is not None:
        metadata |= {"engine_order": case.engine.order, "page_stride": str(case.engine.page_stride)}
        if case.engine.layer is not None:
            metadata["layer"] = str(case.engine.layer)
    return metadata
