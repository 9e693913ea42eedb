"""Computes everything that a report shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from client.commands.doctor import devices, versions
from client.commands.profile import profile_here
from indexer.case import Case
from indexer.case.case import part_of
from indexer.fidelity import CaseFidelity, OutOfRangeError, case_fidelity
from indexer.profile import PlanBalance, plan_balance
from indexer.replay import load_case
from indexer.verify import Verification, finite_rows, verify_case, with_finite_queries
from indexer.wire import Profile
from kernel.contract import BLOCK_TOKENS

if TYPE_CHECKING:
    from kernel.backends.base import Precision

NO_KEYS = "The case holds NVFP4 pages, not the keys they were quantised from: what they cost is not known."
MAX_MAP_CELLS = 1 << 24
"""Most scores that are computed for their picture."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """Parts of a report.

    Attributes:
        name: the case's file.
        case: the case.
        verification: of a backend and of an engine's result.
        fidelity: None if it is not known.
        no_fidelity: why it is not known.
        profiles: cold and warm.
        balance: of the gfx950 plan; None without prefill.
        pictures: PNG files by section, empty without matplotlib.
        environment: names and values of this machine.
    """

    name: str
    case: Case
    verification: Verification
    fidelity: CaseFidelity | None
    no_fidelity: str
    profiles: tuple[Profile, ...]
    balance: PlanBalance | None
    pictures: dict[str, bytes]
    environment: dict[str, str]


def gather(
    case: Case,
    name: str,
    backend: str,
    precision: str,
    repeats: int,
    on_step: Callable[[str], None],
) -> Gathered:
    """Runs everything that a report shows.

    Raises:
        InvalidArgumentError: no such backend, or keys that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    on_step("verifying")
    verification = verify_case(case, name, backend, precision=cast("Precision", precision))
    scored = with_finite_queries(case, finite_rows(case))
    fidelity, no_fidelity = None, NO_KEYS
    if scored is not case:
        no_fidelity = "Some queries are not finite: what cheaper keys cost them is not known."
    elif case.index_k is not None:
        on_step("comparing formats")
        try:
            fidelity = case_fidelity(case, name, backend)
        except OutOfRangeError as error:  # the rest of the report does not depend on it
            no_fidelity = f"{error.argument} = {error.value}: bf16 keys select nothing to compare with."
    profiles = []
    for cache in ("cold", "warm"):
        on_step(f"profiling, {cache}")
        profiles.append(profile_here(scored, cache, backend, precision, repeats=repeats))
    balance = plan_balance(scored)
    on_step("drawing")
    pictures = _pictures(scored, backend, fidelity, profiles, balance)
    environment = {**versions(), **devices()}
    return Gathered(
        name, case, verification, fidelity, no_fidelity, tuple(profiles), balance, pictures, environment
    )


def _pictures(
    case: Case,
    backend: str,
    fidelity: CaseFidelity | None,
    profiles: list[Profile],
    balance: PlanBalance | None,
) -> dict[str, bytes]:
    try:
        from client.plots import draw_fidelity, draw_profile, draw_score_map, score_map
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return {}
    pictures = {"profile": draw_profile(profiles, balance)} if case.rows else {}
    if fidelity is not None and fidelity.counted_rows:
        pictures["fidelity"] = draw_fidelity(fidelity)
    shown, name = _mapped(case)
    if shown is not None:
        result = load_case(shown, backend).score()
        if result.scores is not None:
            scores = np.asarray(result.scores.cpu().numpy())
            cells = score_map(shown, scores, result.block_ids.cpu().numpy())
            pictures["map"] = draw_score_map(cells, name or f"request {cells.request}")
    return pictures


def _mapped(case: Case) -> tuple[Case | None, str]:
    """Returns the case whose scores are drawn, and its name: of a large call the end of one request."""
    if not case.rows or case.rows * case.num_score_blocks <= MAX_MAP_CELLS:
        return (case if case.rows else None), ""
    request = int(np.argmax(case.query_lens * case.seq_lens))
    first, last = (int(place) for place in case.cu_seqlens_q[request : request + 2])
    blocks = -(-int(case.seq_lens[request]) // BLOCK_TOKENS)
    start = max(first, last - max(1, MAX_MAP_CELLS // (blocks * case.num_heads)))
    name = f"request {request}" + (f", its last {last - start:,} queries" if start > first else "")
    return part_of(case, request, start, last), name
