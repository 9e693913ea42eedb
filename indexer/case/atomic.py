"""Tensors to a file, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from indexer.case.container import Array


def save_atomically(
    tensors: Mapping[str, Array], metadata: Mapping[str, str], path: str | os.PathLike[str]
) -> None:
    """Write a safetensors file by renaming a finished one, so that no reader ever sees a part of it.

    Raises:
        OSError: it cannot be written; an older file of that name is left as it was.
    """
    target = Path(path)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        save_file(
            {name: np.ascontiguousarray(array) for name, array in tensors.items()}, part, dict(metadata)
        )
        part.chmod(0o666 & ~_umask())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return mask
