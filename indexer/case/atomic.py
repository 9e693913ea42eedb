"""Tensors to a file, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from indexer.case.container import Array
from indexer.case.encoder import encode_container


def save_atomically(
    tensors: Mapping[str, Array], metadata: Mapping[str, str], path: str | os.PathLike[str]
) -> None:
    """Write a safetensors file by renaming a finished one, so that no reader ever sees a part of it.

    Raises:
        OSError: it cannot be written; an older file of that name is left as it was.
        CaseFileError: a dtype that the container has no name for, or metadata that are too long.
    """
    target = Path(path)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(encode_container(tensors, metadata))
        part.chmod(0o666 & ~_umask())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return mask
