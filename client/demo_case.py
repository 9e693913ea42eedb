"""The case that ``demo`` scores when none is named."""

from __future__ import annotations

from pathlib import Path

from kernel.errors import InvalidArgumentError

NAME = "code_8k_l20.safetensors"


def demo_case() -> Path:
    """The case inside the installed package, or the clone's.

    Raises:
        InvalidArgumentError: neither is there.
    """
    here = Path(__file__).resolve().parent
    places = (here / "data" / NAME, here.parent / "tests" / "data" / NAME)
    for place in places:
        if place.is_file():
            return place
    raise InvalidArgumentError("CASE", "not given", f"{NAME} is not installed", "name a case file")
