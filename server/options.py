"""Query options of the routes that take a body."""

from __future__ import annotations

from collections import Counter
from typing import Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field

from indexer.case.case import MAX_FORCED_BLOCKS
from kernel.backends.base import Order
from kernel.contract import MAX_SEQ_LEN, MAX_TOPK
from server.problems import invalid


class ScoreOptions(BaseModel):
    """Options of a scoring call. What is not given is the case's, or for sequences the server's."""

    model_config = ConfigDict(extra="forbid")

    topk: int | None = Field(default=None, ge=1, le=MAX_TOPK, description="Blocks to select for a row.")
    init_blocks: int | None = Field(
        default=None, ge=0, le=MAX_FORCED_BLOCKS, description="Blocks forced at a row's start."
    )
    local_blocks: int | None = Field(
        default=None,
        ge=0,
        le=MAX_FORCED_BLOCKS,
        description="Blocks forced at a row's end; wins over init_blocks.",
    )
    order: Order | None = Field(
        default=None, description="`score`: best block first. `block`: block ids ascending. -1 last in both."
    )
    scores: bool = Field(default=True, description="Whether the answer holds the scores, too.")


class ProfileOptions(BaseModel):
    """Options of a profile."""

    model_config = ConfigDict(extra="forbid")

    cache: Literal["cold", "warm"] = Field(
        default="cold", description="`cold`: the device's caches are flushed before each run."
    )
    repeats: int = Field(
        default=5, ge=1, le=100, description="Runs that are measured, after one that is not."
    )
    scores: bool = Field(
        default=False, description="Whether the scores are kept, as a caller that wants them would."
    )
    trace: bool = Field(default=False, description="Whether to add a chrome trace of one more run.")


class AppendOptions(BaseModel):
    """Options of an append."""

    model_config = ConfigDict(extra="forbid")

    start: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEQ_LEN,
        description="Append only if the sequence holds so many tokens, else 409: makes a repeated request "
        "after a lost answer safe.",
    )


def check_given_once(query: bytes) -> None:
    """Refuse an option that is given twice: which one counts would be a guess.

    Raises:
        ProblemError: 422.
    """
    if b"&" in query:
        names = Counter(name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True))
        for name, count in names.items():
            if count > 1:
                raise invalid(name[:60], f"{count} values", "must be given once", "leave the others out")
