"""Which differences people are shown."""

from __future__ import annotations

from client.engine_report import kind_counts, shown_of, some_of_each_kind
from tests.support.judged import judged, recorded, right_case, with_result


def test_rows_of_many_wrong_scores_hide_no_other_kind() -> None:
    case = right_case()
    scores, ids = recorded(case)
    scores[scores < 1e28] += 1
    ids[1, 4, 2] = -5  # of the last row
    verdict = judged(with_result(case, scores, ids))
    assert verdict.differences["score"]["fault"] > 60
    shown = some_of_each_kind(verdict, 12)
    assert len(shown) == 12
    assert shown[-1].kind == "id"
    assert shown == sorted(shown, key=verdict.findings.index)
    assert {kind: told for kind, _, told in kind_counts(verdict, shown)} == {"id": "1", "score": "11"}
    assert shown_of(verdict, shown).startswith(f"12 of {verdict.total_findings} differences")
    assert some_of_each_kind(verdict, 10_000) == list(verdict.findings)
