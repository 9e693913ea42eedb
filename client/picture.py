"""Pictures that ``--picture`` names: their kinds, and the package that draws them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client.output_file import check_output
from kernel.errors import InvalidArgumentError


def check_picture(picture: Path, *cases: str) -> None:
    """Refuse a picture of a kind that is not drawn, or that cannot be written: see :func:`check_output`.

    Raises:
        InvalidArgumentError: naming the option, the path and the reason.
    """
    check_output("--picture", picture, *cases)
    if picture.suffix.lower() not in (".png", ".svg"):
        limit = f"is drawn as PNG or SVG, not {picture.suffix or 'a file without suffix'}"
        raise InvalidArgumentError("--picture", picture, limit, "end its name in .png or .svg")


@contextmanager
def importing_plots(picture: Path) -> Iterator[None]:
    """Around the import of what draws with matplotlib, which is an extra.

    Raises:
        InvalidArgumentError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = "pip install 'nvfp4-indexer[plot]'"
        raise InvalidArgumentError("--picture", picture, f"{error.name} is missing", remedy) from error
