"""Stateless scoring of a case."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from indexer.case import Case, decode_case
from indexer.wire import ScoreReply
from server.documents import CASE_BODY, SCORE_RESPONSES
from server.engine import Engine
from server.json_calls import case_of_json
from server.limits import check_case
from server.options import ScoreOptions
from server.scoring import answer_scores

router = APIRouter(tags=["score"])


@router.post(
    "/v1/score", summary="Score a case", responses=SCORE_RESPONSES, openapi_extra={"requestBody": CASE_BODY}
)
async def score(request: Request, options: Annotated[ScoreOptions, Query()]) -> Response:
    """Score the queries of a case file against its keys. Touches no sequence.

    Options take the place of what the case says. The answer has the form of the body unless `Accept` asks for
    the other one.
    """

    def score_case(engine: Engine, owner: str, case: Case) -> ScoreReply:
        check_case(case, engine.limits, scores=options.scores)
        return engine.score_case(owner, case, options)

    return await answer_scores(request, decode_case, case_of_json, score_case)
