"""The score of a mutation campaign, in one line for each set of mutants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tests.mutation.mutants import Mutant

PROVED = "proved for every path"
UNUSED = "result unused"
HIDDEN = "hidden by the causal mask"
REVIEWED = "reviewed"
SURVIVED = "survived"
EQUIVALENT = (PROVED, UNUSED, HIDDEN, REVIEWED)
"""Outcomes of a mutant that changes nothing; the others but ``SURVIVED`` are the errors that caught one."""

PROPERTY = "mutation score"
"""Name under which a test records a set of mutants and its outcomes; parts of a set are added up."""

Outcomes = Mapping[str, int]
Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is the class of the error that caught the mutant, or one of those above."""

    mutant: Mutant
    outcome: str
    detail: str


def record(name: str, verdicts: Iterable[Verdict], record_property: Record) -> None:
    """For the summary that ends the test run."""
    record_property(PROPERTY, recorded(name, (verdict.outcome for verdict in verdicts)))


def recorded(name: str, outcomes: Iterable[str]) -> tuple[str, dict[str, int]]:
    """What a test records of a set: of builtin types, since it may travel from a worker's process."""
    return name, dict(Counter(outcomes))


def lines(parts: Iterable[tuple[str, Outcomes]]) -> list[str]:
    """A line for each set, from all of its parts."""
    sets: dict[str, Counter[str]] = {}
    for name, outcomes in parts:
        sets.setdefault(name, Counter()).update(outcomes)
    return [f"{name}: {line(sets[name])}" for name in sorted(sets)]


def line(outcomes: Outcomes) -> str:
    """How many mutants are caught, by what, and how many are equivalent, by what."""
    counts = Counter(outcomes)
    total, survived = counts.total(), counts[SURVIVED]
    equivalent = sum(counts[one] for one in EQUIVALENT)
    by = ", ".join(f"{name} {count}" for name, count in counts.most_common() if count)
    text = f"{total - survived - equivalent} caught + {equivalent} equivalent of {total} mutants"
    return f"{text}, {survived} SURVIVED ({by})" if survived else f"{text} ({by})"
