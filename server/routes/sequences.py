"""Sequences with a cache of their own: make, append, fork, score, look, drop."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from indexer.wire import decode_keys, decode_sequences_call
from kernel.page import blocks_of
from server.call import run_body_call, run_call
from server.context import context_of
from server.documents import (
    CHANGE_RESPONSES,
    KEYS_BODY,
    KEYS_RESPONSES,
    MAKE_RESPONSES,
    PROBLEM_503,
    SCORE_SEQUENCES_RESPONSES,
    SEQUENCES_BODY,
    UNKNOWN_SEQUENCE,
)
from server.engine import Engine
from server.json_calls import keys_of_json, sequences_call_of_json
from server.media import BINARY, form_of_body
from server.models import SequenceInfo
from server.options import AppendOptions, ScoreOptions
from server.replies import server_timing
from server.scoring import answer_scores
from server.sequences import LiveSequence
from server.state import state_of

router = APIRouter(prefix="/v1/sequences", tags=["sequences"])


@router.post(
    "",
    summary="Make an empty sequence",
    status_code=201,
    response_model=SequenceInfo,
    responses=MAKE_RESPONSES,
)
async def make(request: Request) -> Response:
    """Its id is valid for this token until it is deleted or expires, or the server ends."""
    return _shown(request, 201, await run_call(request, lambda engine, owner: engine.add(owner)))


@router.post(
    "/score",
    summary="Score a ragged batch over sequences",
    responses=SCORE_SEQUENCES_RESPONSES,
    openapi_extra={"requestBody": SEQUENCES_BODY},
)
async def score(request: Request, options: Annotated[ScoreOptions, Query()]) -> Response:
    """Each sequence's queries stand at its last positions, so append this step's keys first.

    A sequence may be named several times. The answer has the form of the body unless `Accept` asks for the
    other one.
    """
    num_heads = state_of(request).settings.num_index_heads
    return await answer_scores(
        request,
        decode_sequences_call,
        lambda body: sequences_call_of_json(body, num_heads),
        lambda engine, owner, call: engine.score_sequences(owner, call, options),
    )


@router.get(
    "/{id}",
    summary="Look at a sequence",
    response_model=SequenceInfo,
    responses={**UNKNOWN_SEQUENCE, **PROBLEM_503},
)
async def look(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """Its length as of the last call that finished. Does not wait for the device."""
    engine = state_of(request).ready_engine()
    return _shown(request, 200, engine.sequences.get(context_of(request.scope).owner, id))


@router.post(
    "/{id}/keys",
    summary="Append keys",
    response_model=SequenceInfo,
    responses=KEYS_RESPONSES,
    openapi_extra={"requestBody": KEYS_BODY},
)
async def append(
    request: Request,
    id: str,  # noqa: A002 - the route's parameter
    options: Annotated[AppendOptions, Query()],
) -> Response:
    """Quantise index keys to NVFP4 and append them, all or none."""
    form = form_of_body(request)
    decode = decode_keys if form == BINARY else keys_of_json

    def work(engine: Engine, owner: str, body: bytearray) -> tuple[LiveSequence, dict[str, float]]:
        began = time.perf_counter()
        keys = decode(body)
        decoded = time.perf_counter()
        sequence = engine.append(owner, id, keys, options.start)
        return sequence, {"decode": decoded - began, "append": time.perf_counter() - decoded}

    sequence, stages = await run_body_call(request, form, work)
    context_of(request.scope).stages.update(stages)
    return _shown(request, 200, sequence)


@router.post(
    "/{id}/fork",
    summary="Fork a sequence",
    status_code=201,
    response_model=SequenceInfo,
    responses={**MAKE_RESPONSES, **UNKNOWN_SEQUENCE},
)
async def fork(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """The fork has the same keys. Pages are shared until one of the two appends to a partial one."""
    return _shown(request, 201, await run_call(request, lambda engine, owner: engine.fork(owner, id)))


@router.delete(
    "/{id}",
    summary="Drop a sequence",
    status_code=204,
    response_class=Response,
    responses=CHANGE_RESPONSES,
)
async def drop(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """Pages that no fork shares are zeroed and free again."""
    await run_call(request, lambda engine, owner: engine.remove(owner, id))
    return Response(status_code=204, headers=server_timing(context_of(request.scope).stages))


def _shown(request: Request, status: int, sequence: LiveSequence) -> Response:
    shown = SequenceInfo(id=sequence.id, length=sequence.length, blocks=blocks_of(sequence.length))
    headers = server_timing(context_of(request.scope).stages)
    if status == 201:
        headers["Location"] = f"/v1/sequences/{sequence.id}"
    return Response(shown.model_dump_json(), status, headers, media_type="application/json")
