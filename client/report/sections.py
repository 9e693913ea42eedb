"""What a report is about: everything computed, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from client.commands.doctor import devices, versions
from client.commands.profile import profile_here
from indexer.case import Case
from indexer.finite_queries import finite_rows, with_finite_queries
from indexer.key_fidelity import CaseFidelity, case_fidelity
from indexer.plan_balance import PlanBalance, plan_balance
from indexer.replay import load_case
from indexer.verify import Verification, verify_case
from indexer.wire import Profile

if TYPE_CHECKING:
    from kernel.backends.base import Precision

MAX_MAP_CELLS = 1 << 24
"""Scores up to which the whole call is scored for its picture."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """Parts of a report.

    Attributes:
        name: the case's file.
        case: the case.
        verification: of a backend and of an engine's result.
        fidelity: None for a case without keys before quantisation, or with queries that are not finite.
        profiles: cold and warm.
        balance: of the gfx950 plan; None without prefill.
        pictures: PNG files by section, empty without matplotlib.
        environment: names and values of this machine.
    """

    name: str
    case: Case
    verification: Verification
    fidelity: CaseFidelity | None
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
    """Run everything that a report shows.

    Raises:
        InvalidArgumentError: no such backend, or keys that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    on_step("verifying")
    verification = verify_case(case, name, backend, precision=cast("Precision", precision))
    scored = with_finite_queries(case, finite_rows(case))
    fidelity = None
    if case.index_k is not None and scored is case:
        on_step("comparing formats")
        fidelity = case_fidelity(case, name, backend)
    profiles = []
    for cache in ("cold", "warm"):
        on_step(f"profiling, {cache}")
        profiles.append(profile_here(scored, cache, repeats, False, False, backend, precision))
    balance = plan_balance(scored)
    on_step("drawing")
    pictures = _pictures(scored, backend, fidelity, profiles, balance)
    environment = {**versions(), **devices()}
    return Gathered(name, case, verification, fidelity, tuple(profiles), balance, pictures, environment)


def _pictures(
    case: Case,
    backend: str,
    fidelity: CaseFidelity | None,
    profiles: list[Profile],
    balance: PlanBalance | None,
) -> dict[str, bytes]:
    try:
        from client.fidelity_plot import draw_fidelity
        from client.profile_plot import draw_profile
        from client.score_map import draw_score_map, score_map
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return {}
    pictures = {"profile": draw_profile(profiles, balance)}
    if fidelity is not None and fidelity.counted_rows:
        pictures["fidelity"] = draw_fidelity(fidelity)
    if 0 < case.rows * case.num_score_blocks <= MAX_MAP_CELLS:
        result = load_case(case, backend).score()
        if result.scores is not None:
            scores = np.asarray(result.scores.cpu().numpy())
            cells = score_map(case, scores, result.block_ids.cpu().numpy())
            pictures["map"] = draw_score_map(cells, f"request {cells.request}")
    return pictures
