"""Where a call's time goes."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from indexer.case import decode_case
from indexer.profile import profile_case
from server.call import run_body_call
from server.context import context_of
from server.documents import CASE_BODY, PROFILE_RESPONSES
from server.engine import Engine
from server.json_calls import case_of_json
from server.limits import check_case
from server.media import BINARY, form_of_body
from server.models import ProfileReply
from server.options import ProfileOptions
from server.replies import server_timing

router = APIRouter(tags=["score"])


@router.post(
    "/v1/profile",
    summary="Profile a case",
    response_model=ProfileReply,
    responses=PROFILE_RESPONSES,
    openapi_extra={"requestBody": CASE_BODY},
)
async def profile(request: Request, options: Annotated[ProfileOptions, Query()]) -> Response:
    """Run a case several times and show each stage's time, and the speed beside the device's own floor.

    The device serves nothing else meanwhile. It ends before its next run when the deadline has passed or the
    client is gone.
    """
    form = form_of_body(request)
    decode = decode_case if form == BINARY else case_of_json
    context = context_of(request.scope)

    def work(engine: Engine, _: str, body: bytearray) -> str:
        case = decode(body)
        place = context.place
        if place is None:
            raise AssertionError("a call that runs has a place")
        check_case(case, engine.limits, scores=options.scores)
        profile = profile_case(
            engine.cases,
            case,
            cache=options.cache,
            repeats=options.repeats,
            scores=options.scores,
            trace=options.trace,
            before_run=lambda: place.check(context.deadline),
        )
        return json.dumps(dataclasses.asdict(profile))

    text = await run_body_call(request, form, work)
    headers = server_timing(context.stages)
    return Response(text, headers=headers, media_type="application/json")
