"""The routes, one concern a file."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from importlib import metadata, resources
from typing import Annotated, TypeVar

import torch
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST

from indexer.case import Case, decode_case
from indexer.case.container import Buffer
from indexer.profile import profile_case
from indexer.wire import ScoreReply, decode_keys, decode_sequences_call
from kernel.backends import registry
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.page import blocks_of
from server.engine import Engine, LiveSequence, state_of
from server.http import context_of, read_body
from server.limits import AppendOptions, ProfileOptions, ScoreOptions, check_case, check_given_once
from server.openapi import (
    CASE_BODY,
    CHANGE_RESPONSES,
    KEYS_BODY,
    KEYS_RESPONSES,
    MAKE_RESPONSES,
    METRICS_RESPONSES,
    PROBLEM_503,
    PROFILE_RESPONSES,
    SCORE_RESPONSES,
    SCORE_SEQUENCES_RESPONSES,
    SEQUENCES_BODY,
    UNKNOWN_SEQUENCE,
)
from server.score_map import draw
from server.wire import (
    BINARY,
    JSON,
    Activity,
    Alive,
    BackendInfo,
    BuffersResponse,
    CacheInfo,
    CallMap,
    Form,
    Info,
    Limits,
    ProfileReply,
    Ready,
    RouteLatency,
    SequenceInfo,
    case_of_json,
    encoded,
    form_of_body,
    form_of_reply,
    keys_of_json,
    sequences_call_of_json,
    server_timing,
)

# The way of a request to the device: ready, place, body, queue, run.

T = TypeVar("T")


async def run_call(request: Request, work: Callable[[Engine, str], T]) -> T:
    """Run a call without a body.

    Args:
        request: the request.
        work: what runs on the device's thread, given the engine and the request's owner.

    Raises:
        ProblemError: 503, 429, 504, or what ``work`` raises.
    """
    return await _run(request, None, lambda engine, owner, _: work(engine, owner))


async def run_body_call(request: Request, form: Form, work: Callable[[Engine, str, bytearray], T]) -> T:
    """Run a call with a body.

    Args:
        request: the request.
        form: the body's.
        work: what runs on the device's thread, given the engine, the request's owner and the body.

    Raises:
        ProblemError: 422 for an option that is given twice, 503, 429, 413, 504, or what ``work`` raises.
    """
    check_given_once(request.scope["query_string"])
    return await _run(request, form, work)


async def _run(request: Request, form: Form | None, work: Callable[[Engine, str, bytearray], T]) -> T:
    state, context = state_of(request), context_of(request.scope)
    engine = state.ready_engine()
    context.place = place = state.worker.admit()
    began = time.perf_counter()
    body = bytearray()
    if form is not None:
        settings = state.settings
        limit = settings.max_json_bytes if form == JSON else settings.max_body_bytes
        body = await read_body(request, place, limit, context.deadline)
        state.metrics.received.inc(len(body))
        context.stages["receive"] = time.perf_counter() - began
    owner = context.owner
    result, waited = await place.run(lambda: work(engine, owner, body), context.deadline, request.receive)
    context.stages["queue"] = waited
    return result


# What the two scoring routes share: body to call, call to reply, reply to answer, each of them timed.

C = TypeVar("C")


async def answer_scores(
    request: Request,
    from_binary: Callable[[bytearray], C],
    from_json: Callable[[bytearray], C],
    score: Callable[[Engine, str, C], ScoreReply],
) -> Response:
    """Answer a scoring request.

    Args:
        request: the request.
        from_binary: decodes a safetensors body.
        from_json: decodes a JSON body.
        score: scores what was decoded, given the engine and the request's owner.

    Raises:
        ProblemError: see :func:`run_body_call`; 415 and 406 for the body's and the answer's form.
    """
    form = form_of_body(request)
    reply_form = form_of_reply(request, form)
    decode = from_binary if form == BINARY else from_json

    def work(engine: Engine, owner: str, body: bytearray) -> tuple[list[Buffer], dict[str, float]]:
        began = time.perf_counter()
        call = decode(body)
        decoded = time.perf_counter()
        reply = score(engine, owner, call)
        scored = time.perf_counter()
        buffers = encoded(reply, reply_form)
        encode = time.perf_counter() - scored
        return buffers, {"decode": decoded - began, **reply.timings, "encode": encode}

    buffers, stages = await run_body_call(request, form, work)
    context = context_of(request.scope)
    context.stages.update(stages)
    seconds = state_of(request).settings.deadline_seconds
    return BuffersResponse(buffers, reply_form, server_timing(context.stages), seconds)


# Liveness and readiness.

health_router = APIRouter(tags=["health"])


@health_router.head("/healthz", include_in_schema=False)
@health_router.get("/healthz", summary="Liveness", response_model=Alive)
async def healthz() -> Response:
    """The process answers. It may not be ready."""
    return Response(Alive(status="ok").model_dump_json(), media_type="application/json")


@health_router.head("/readyz", include_in_schema=False)
@health_router.get("/readyz", summary="Readiness", response_model=Ready, responses=PROBLEM_503)
async def readyz(request: Request) -> Response:
    """Kernels are compiled and the self-test against the oracle passed."""
    engine = state_of(request).ready_engine()
    ready = Ready(status="ready", backend=engine.scorer.backend, device=str(engine.scorer.device))
    return Response(ready.model_dump_json(), media_type="application/json")


# What serves, how full its cache is, and what it did last.

router = APIRouter(tags=["state"])


@router.get("/v1/info", summary="What serves", response_model=Info, responses=PROBLEM_503)
async def info(request: Request) -> Response:
    """Backend, device, geometry, defaults and limits."""
    state = state_of(request)
    engine, settings = state.ready_engine(), state.settings
    config = engine.scorer.config
    found = Info(
        version=_version(),
        backend=engine.scorer.backend,
        device=str(engine.scorer.device),
        device_name=_device_name(engine.scorer.device),
        precision=config.precision,
        num_index_heads=config.num_index_heads,
        num_pages=engine.scorer.num_pages,
        page_bytes=PAGE_BYTES,
        block_tokens=BLOCK_TOKENS,
        head_dim=HEAD_DIM,
        topk=config.topk_blocks,
        init_blocks=config.init_blocks,
        local_blocks=config.local_blocks,
        order=config.order,
        limits=Limits(
            max_body_bytes=settings.max_body_bytes,
            max_json_bytes=settings.max_json_bytes,
            max_call_bytes=settings.max_call_bytes,
            max_call_flop=engine.limits.max_flop,
            max_connections=settings.max_connections,
            max_sequences=settings.max_sequences,
            max_sequences_per_token=settings.max_sequences_per_token,
            max_keys_per_token=settings.max_keys_per_token,
            sequence_ttl_seconds=settings.sequence_ttl_seconds,
            queue_places=settings.queue_places,
            queue_bytes=settings.queue_bytes,
            deadline_seconds=settings.deadline_seconds,
        ),
        backends=[
            BackendInfo(name=status.name, usable=status.usable, reason=status.reason)
            for status in registry.statuses()
        ],
    )
    return Response(found.model_dump_json(), media_type="application/json")


@router.get("/v1/cache", summary="Occupancy of the cache", response_model=CacheInfo, responses=PROBLEM_503)
async def cache(request: Request) -> Response:
    """Pages in use, and the sequences of the token that asks. Does not wait for the device."""
    engine = state_of(request).ready_engine()
    free, num_pages = engine.scorer.num_free_pages, engine.scorer.num_pages
    found = CacheInfo(
        num_pages=num_pages,
        free_pages=free,
        used_pages=num_pages - free,
        page_bytes=PAGE_BYTES,
        total_sequences=engine.sequences.count,
        sequences=[
            SequenceInfo(id=sequence.id, length=sequence.length, blocks=blocks_of(sequence.length))
            for sequence in engine.sequences.of_owner(context_of(request.scope).owner)
        ],
    )
    return Response(found.model_dump_json(), media_type="application/json")


@router.get("/v1/activity", summary="What the page shows", response_model=Activity, responses=PROBLEM_503)
async def activity(request: Request) -> Response:
    """Queue, latencies, and the score map of the last call of the token that asks."""
    state = state_of(request)
    record = state.ready_engine().records.get(context_of(request.scope).owner)
    worker = state.worker
    found = Activity(
        waiting=worker.waiting,
        busy=worker.busy,
        places_taken=worker.places_taken,
        places=worker.places,
        uptime_seconds=round(time.monotonic() - state.started, 3),
        latencies=[
            RouteLatency(
                route=latency.route,
                calls=latency.count,
                p50_ms=round(1e3 * latency.p50, 3),
                p99_ms=round(1e3 * latency.p99, 3),
            )
            for latency in state.metrics.latencies()
        ],
        last_call=None if record is None else CallMap.model_validate(draw(record)),
    )
    return Response(found.model_dump_json(), media_type="application/json")


def _version() -> str:
    try:
        return metadata.version("nvfp4-indexer")
    except metadata.PackageNotFoundError:
        return "source tree"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"


# Prometheus metrics.


@router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=METRICS_RESPONSES)
async def metrics(request: Request) -> Response:
    """Requests and stages as histograms; the queue and the cache as of this moment."""
    state = state_of(request)
    worker, engine = state.worker, state.engine
    gauges = {
        "ready": ("Whether the self-test passed", float(engine is not None and engine.lost is None)),
        "waiting_calls": ("Calls that wait for the device", float(worker.waiting)),
        "places_taken": ("Requests in the server", float(worker.places_taken)),
        "places": ("Requests that may be in the server", float(worker.places)),
        "body_bytes": ("Bytes of the bodies in the server", float(worker.bytes_taken)),
    }
    if engine is not None:
        gauges["pages"] = ("Pages of the cache", float(engine.scorer.num_pages))
        gauges["free_pages"] = ("Pages that no sequence holds", float(engine.scorer.num_free_pages))
        gauges["sequences"] = ("Live sequences", float(engine.sequences.count))
    return Response(state.metrics.exposition(gauges), media_type=CONTENT_TYPE_LATEST)


# The page for people: one file, no outside assets.

_HTML = resources.files("server").joinpath("page/index.html").read_text(encoding="utf-8")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.head("/", include_in_schema=False)
@router.get("/", summary="The page for people", response_class=HTMLResponse)
async def page() -> Response:
    """Device, backend, cache, latencies, and the last call's score map with its selection."""
    return HTMLResponse(_HTML, headers=_HEADERS)


# Where a call's time goes.

profile_router = APIRouter(tags=["score"])


@profile_router.post(
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


# Stateless scoring of a case.

score_router = APIRouter(tags=["score"])


@score_router.post(
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


# Sequences with a cache of their own: make, append, fork, score, look, drop.

sequences_router = APIRouter(prefix="/v1/sequences", tags=["sequences"])


@sequences_router.post(
    "",
    summary="Make an empty sequence",
    status_code=201,
    response_model=SequenceInfo,
    responses=MAKE_RESPONSES,
)
async def make(request: Request) -> Response:
    """Its id is valid for this token until it is deleted or expires, or the server ends."""
    return _shown(request, 201, await run_call(request, lambda engine, owner: engine.add(owner)))


@sequences_router.post(
    "/score",
    name="score",
    summary="Score a ragged batch over sequences",
    responses=SCORE_SEQUENCES_RESPONSES,
    openapi_extra={"requestBody": SEQUENCES_BODY},
)
async def score_sequences(request: Request, options: Annotated[ScoreOptions, Query()]) -> Response:
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


@sequences_router.get(
    "/{id}",
    summary="Look at a sequence",
    response_model=SequenceInfo,
    responses={**UNKNOWN_SEQUENCE, **PROBLEM_503},
)
async def look(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """Its length as of the last call that finished. Does not wait for the device."""
    engine = state_of(request).ready_engine()
    return _shown(request, 200, engine.sequences.get(context_of(request.scope).owner, id))


@sequences_router.post(
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


@sequences_router.post(
    "/{id}/fork",
    summary="Fork a sequence",
    status_code=201,
    response_model=SequenceInfo,
    responses={**MAKE_RESPONSES, **UNKNOWN_SEQUENCE},
)
async def fork(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """The fork has the same keys. Pages are shared until one of the two appends to a partial one."""
    return _shown(request, 201, await run_call(request, lambda engine, owner: engine.fork(owner, id)))


@sequences_router.delete(
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


ROUTERS = (health_router, router, score_router, sequences_router, profile_router)
