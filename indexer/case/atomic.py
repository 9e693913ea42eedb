"""Bytes and tensors to a file, whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from indexer.case.container import Array, Buffer
from indexer.case.encoder import encode_container

NAME_CHARS = 32
"""Characters of the file's name in that of its unfinished copy, which must not grow too long."""


def save_atomically(
    tensors: Mapping[str, Array], metadata: Mapping[str, str], path: str | os.PathLike[str]
) -> None:
    """Write a safetensors file as :func:`write_atomically` does.

    Raises:
        OSError: it cannot be written; an older file of that name is left as it was.
        CaseFileError: a dtype that the container has no name for, or metadata that are too long.
    """
    write_atomically(encode_container(tensors, metadata), path)


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
