"""Options that several commands share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Precision(str, enum.Enum):
    """Score error allowed: 2^-16 or 2^-9 of the sum of |q_i k_i|."""

    exact = "exact"
    fast = "fast"


class Order(str, enum.Enum):
    """Order of a row's block ids."""

    score = "score"
    block = "block"


BackendOption = Annotated[
    str, typer.Option(help="A backend's name (see doctor), or auto for the best usable one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
PrecisionOption = Annotated[Precision, typer.Option(help="Score error allowed: 2^-16 or 2^-9 of sum|q k|.")]
