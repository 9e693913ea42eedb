"""Files that an option names to be written: checked before the work, written whole, refused by the option."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from indexer.case.atomic import write_atomically
from indexer.case.container import Buffer
from kernel.errors import InvalidArgumentError


def check_output(option: str, path: Path, *cases: str) -> None:
    """Refuse what cannot be written, before anything is computed. Changes nothing.

    Args:
        option: the option that names the file, for messages.
        path: the file.
        cases: the case files that are read, which must not be overwritten.

    Raises:
        InvalidArgumentError: the path is a folder or a case itself, or cannot be written.
    """
    try:
        found: os.stat_result | None = path.stat()
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise _refusal(option, path, error) from error
    if found is None:
        target = Path(os.path.realpath(path))
        _check_folder(option, path, next(folder for folder in target.parents if os.path.lexists(folder)))
        return
    if stat.S_ISDIR(found.st_mode):
        raise InvalidArgumentError(option, path, "is a folder", f"name a file with {option}")
    if any(os.path.samestat(found, Path(case).stat()) for case in cases):
        raise InvalidArgumentError(option, path, "is the case itself", f"name another file with {option}")
    if stat.S_ISREG(found.st_mode):
        _check_folder(option, path, Path(os.path.realpath(path)).parent)
    elif not (stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode)):
        limit = "must be a regular file, a FIFO or a character device"
        raise InvalidArgumentError(option, path, limit, f"name another file with {option}")


def write_output(option: str, path: Path, buffers: Iterable[Buffer]) -> None:
    """Write a file, whole or not at all, and the folders it lies in.

    Raises:
        InvalidArgumentError: naming the option, the path and the reason; an older file is left as it was.
    """
    try:
        if not path.exists():
            Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(buffers, path)
    except OSError as error:
        raise _refusal(option, path, error) from error


def _check_folder(option: str, path: Path, folder: Path) -> None:
    if not folder.is_dir():
        limit = f"cannot be written: {folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        limit = f"cannot be written: no permission to write in {folder}"
    else:
        return
    raise InvalidArgumentError(option, path, limit, f"name another file with {option}")


def _refusal(option: str, path: Path, error: OSError) -> InvalidArgumentError:
    limit = f"cannot be written: {error.strerror or error}"
    return InvalidArgumentError(option, path, limit, f"name another file with {option}")
