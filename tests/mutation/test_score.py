"""The lines that end a run of the mutation tests."""

from __future__ import annotations

import execnet
import pytest

from tests.mutation.score import PROVED, REVIEWED, SURVIVED, lines, recorded

pytest_plugins = ["pytester"]


def test_a_worker_can_send_what_it_recorded() -> None:
    name, outcomes = recorded("H=1", ["RaceError", PROVED, "RaceError"])
    assert (name, outcomes) == ("H=1", {"RaceError": 2, PROVED: 1})
    assert execnet.loads(execnet.dumps((name, outcomes))) == (name, outcomes)


def test_parts_of_a_set_are_added_up() -> None:
    parts = [
        ("H=2", {"RaceError": 3, PROVED: 1}),
        ("H=1", {"RaceError": 2}),
        ("H=2", {"RaceError": 1, "WrongScoresError": 2, REVIEWED: 1}),
    ]
    assert lines(parts) == [
        "H=1: 2 caught + 0 equivalent of 2 mutants (RaceError 2)",
        "H=2: 6 caught + 2 equivalent of 8 mutants "
        "(RaceError 4, WrongScoresError 2, proved for every path 1, reviewed 1)",
    ]


def test_survivors_are_not_lost() -> None:
    (line,) = lines([("H=4", {SURVIVED: 1, "RaceError": 1})])
    assert line == "H=4: 1 caught + 0 equivalent of 2 mutants, 1 SURVIVED (survived 1, RaceError 1)"


def test_the_terminal_shows_one_line_a_set(pytester: pytest.Pytester) -> None:
    """Also where a part failed."""
    pytester.makeconftest("from tests.conftest import pytest_terminal_summary")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("part", range(4))
        def test_part(record_property, part):
            record_property("mutation score", ("H=1", {"RaceError": 5 + part, "reviewed": 1}))
            assert part != 2
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["*mutation scores*", "H=1: 26 caught + 4 equivalent of 30 mutants (RaceError 26, reviewed 4)"]
    )
