"""Every route, and the way of a request to the device: engine, queue slot, body, device thread, answer."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import metadata, resources
from typing import Annotated, Concatenate, ParamSpec, TypeVar

import torch
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

from indexer.case.container import Buffer
from indexer.profile import profile_case
from indexer.wire import (
    JSON,
    Activity,
    Alive,
    BackendInfo,
    CacheInfo,
    Form,
    Info,
    Limits,
    ProfileReply,
    Ready,
    ScoreReply,
    SequenceInfo,
)
from kernel.backends import registry
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.page import blocks_of
from server import openapi
from server.engine import Engine, LiveSequence, state_of
from server.http import RequestContext, context_of, read_body
from server.limits import (
    AppendOptions,
    ProfileOptions,
    ScoreOptions,
    check_case,
    check_given_once,
    check_trace,
)
from server.score_map import draw
from server.wire import (
    BuffersResponse,
    case_of_body,
    encoded,
    form_of_body,
    form_of_reply,
    json_response,
    keys_of_body,
    sequences_call_of_body,
    server_timing,
)
from server.worker import QueueSlot

health, state_routes, scoring, sequences = (
    APIRouter(tags=[tag]) for tag in ("health", "state", "score", "sequences")
)
_PAGE = resources.files("server").joinpath("page/index.html").read_text(encoding="utf-8")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

# ---- Calls ----

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Call:
    """An admitted request, on its way to the device.

    Attributes:
        form: media type of the body.
        body: the whole body; empty if it has none.
        stages: seconds of each stage on the device's thread, which alone writes them.
    """

    request: Request
    context: RequestContext
    engine: Engine
    slot: QueueSlot
    form: Form
    body: bytearray
    stages: dict[str, float] = field(default_factory=dict)

    async def run(
        self, work: Callable[Concatenate[Engine, str, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Runs ``work`` on the device's thread: engine and owner of the request come before its arguments.

        Raises:
            ProblemError: 504, or what ``work`` raises.
        """
        function = partial(work, self.engine, self.context.owner, *arguments, **options)
        result, self.context.stages["queue"] = await self.slot.run(function, self.request.receive)
        self.context.stages.update(self.stages)
        return result

    def timed(self, stage: str, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Runs a stage of the work, on the device's thread."""
        began = time.perf_counter()
        result = function(*arguments, **options)
        self.stages[stage] = time.perf_counter() - began
        return result


async def admit(request: Request, form: Form | None = None) -> Call:
    """Admits a request: the engine is ready, a queue slot is taken, the body is received.

    Args:
        request: the request.
        form: the body's form; None: the request has none.

    Raises:
        ProblemError: 422, an option is given twice; 503, 429, 413 or 504.
    """
    if form is not None:
        check_given_once(request.scope["query_string"])
    state, context = state_of(request), context_of(request.scope)
    engine = state.ready_engine()
    context.slot = slot = state.worker.admit(context.deadline, context.owner)
    if form is None:
        return Call(request, context, engine, slot, JSON, bytearray())
    began = time.perf_counter()
    limit = state.settings.max_json_bytes if form == JSON else state.settings.max_body_bytes
    body = await read_body(request, slot, limit)
    state.metrics.received.inc(len(body))
    context.stages["receive"] = time.perf_counter() - began
    return Call(request, context, engine, slot, form, body)


# ---- Health ----


@health.get("/healthz", summary="Liveness", response_model=Alive)
async def healthz() -> Response:
    """The process answers. It may not be ready."""
    return json_response(Alive(status="ok"))


@health.get("/readyz", summary="Readiness", response_model=Ready, responses=openapi.PROBLEM_503)
async def readyz(request: Request) -> Response:
    """Kernels are compiled and the self-test against the oracle passed."""
    scorer = state_of(request).ready_engine().scorer
    return json_response(Ready(status="ready", backend=scorer.backend, device=str(scorer.device)))


# ---- State ----


@state_routes.get("/v1/info", summary="What serves", response_model=Info, responses=openapi.PROBLEM_503)
async def info(request: Request) -> Response:
    """Backend, device, geometry, defaults and limits."""
    state = state_of(request)
    engine, settings = state.ready_engine(), state.settings
    config = engine.scorer.config
    limits = {limit.name: getattr(settings, limit.name) for limit in fields(Limits)}
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
        limits=Limits(**{**limits, "max_call_flop": engine.limits.max_flop}),
        backends=tuple(
            BackendInfo(name=status.name, usable=status.usable, reason=status.reason)
            for status in registry.statuses()
        ),
    )
    return json_response(found)


@state_routes.get(
    "/v1/cache", summary="Occupancy of the cache", response_model=CacheInfo, responses=openapi.PROBLEM_503
)
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
        sequences=tuple(map(_sequence_info, engine.sequences.of_owner(context_of(request.scope).owner))),
    )
    return json_response(found)


@state_routes.get(
    "/v1/activity", summary="What the page shows", response_model=Activity, responses=openapi.PROBLEM_503
)
async def activity(request: Request) -> Response:
    """Queue, latencies, and the score map of the last call of the token that asks."""
    state = state_of(request)
    record = state.ready_engine().records.get(context_of(request.scope).owner)
    worker = state.worker
    found = Activity(
        waiting=worker.waiting,
        busy=worker.busy,
        places_taken=worker.slots_taken,
        places=worker.slots,
        uptime_seconds=round(time.monotonic() - state.started, 3),
        latencies=state.metrics.latencies(),
        last_call=None if record is None else draw(record),
    )
    return json_response(found)


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


# ---- Scoring ----


@scoring.post(
    "/v1/score",
    summary="Score a case",
    responses=openapi.SCORE_RESPONSES,
    openapi_extra={"requestBody": openapi.CASE_BODY},
)
async def score(request: Request, options: Annotated[ScoreOptions, Query()]) -> Response:
    """Score the queries of a case file against its keys. Touches no sequence.

    Options take the place of what the case says. The answer has the form of the body unless `Accept` asks for
    the other one.
    """
    return await _answer_scores(request, _score_case, options)


@sequences.post(
    "/v1/sequences/score",
    name="score",
    summary="Score a ragged batch over sequences",
    responses=openapi.SCORE_SEQUENCES_RESPONSES,
    openapi_extra={"requestBody": openapi.SEQUENCES_BODY},
)
async def score_sequences(request: Request, options: Annotated[ScoreOptions, Query()]) -> Response:
    """Each sequence's queries stand at its last positions, so append this step's keys first.

    A sequence may be named several times. The answer has the form of the body unless `Accept` asks for the
    other one.
    """
    return await _answer_scores(request, _score_sequences, options)


async def _answer_scores(
    request: Request,
    work: Callable[[Engine, str, Call, ScoreOptions, Form], list[Buffer]],
    options: ScoreOptions,
) -> Response:
    form = form_of_body(request)
    reply_form = form_of_reply(request, form)
    call = await admit(request, form)
    buffers = await call.run(work, call, options, reply_form)
    return BuffersResponse(buffers, reply_form, server_timing(call.context.stages))


def _score_case(
    engine: Engine, owner: str, call: Call, options: ScoreOptions, reply_form: Form
) -> list[Buffer]:
    case = call.timed("decode", case_of_body, call.body, call.form)
    check_case(case, engine.limits, scores=options.scores)
    return _encoded(call, engine.score_case(owner, case, options), reply_form)


def _score_sequences(
    engine: Engine, owner: str, call: Call, options: ScoreOptions, reply_form: Form
) -> list[Buffer]:
    num_heads = engine.scorer.config.num_index_heads
    batch = call.timed("decode", sequences_call_of_body, call.body, call.form, num_heads)
    return _encoded(call, engine.score_sequences(owner, batch, options), reply_form)


def _encoded(call: Call, reply: ScoreReply, form: Form) -> list[Buffer]:
    call.stages.update(reply.timings)
    return call.timed("encode", encoded, reply, form)


# ---- Sequences ----


@sequences.post(
    "/v1/sequences",
    summary="Make an empty sequence",
    status_code=201,
    response_model=SequenceInfo,
    responses=openapi.MAKE_RESPONSES,
)
async def make(request: Request) -> Response:
    """Its id is valid for this token until it is deleted or expires, or the server ends."""
    call = await admit(request)
    return _made(call, await call.run(Engine.add))


@sequences.get(
    "/v1/sequences/{id}",
    summary="Look at a sequence",
    response_model=SequenceInfo,
    responses={**openapi.UNKNOWN_SEQUENCE, **openapi.PROBLEM_503},
)
async def look(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """Its length as of the last call that finished. Does not wait for the device."""
    engine, context = state_of(request).ready_engine(), context_of(request.scope)
    sequence = engine.sequences.get(context.owner, id)
    return json_response(_sequence_info(sequence), headers=server_timing(context.stages))


@sequences.post(
    "/v1/sequences/{id}/keys",
    summary="Append keys",
    response_model=SequenceInfo,
    responses=openapi.KEYS_RESPONSES,
    openapi_extra={"requestBody": openapi.KEYS_BODY},
)
async def append(
    request: Request,
    id: str,  # noqa: A002 - the route's parameter
    options: Annotated[AppendOptions, Query()],
) -> Response:
    """Quantise index keys to NVFP4 and append them, all or none."""
    call = await admit(request, form_of_body(request))
    sequence = await call.run(_append, call, id, options.start)
    return json_response(_sequence_info(sequence), headers=server_timing(call.context.stages))


def _append(engine: Engine, owner: str, call: Call, sequence: str, start: int | None) -> LiveSequence:
    keys = call.timed("decode", keys_of_body, call.body, call.form)
    return call.timed("append", engine.append, owner, sequence, keys, start)


@sequences.post(
    "/v1/sequences/{id}/fork",
    summary="Fork a sequence",
    status_code=201,
    response_model=SequenceInfo,
    responses={**openapi.MAKE_RESPONSES, **openapi.UNKNOWN_SEQUENCE},
)
async def fork(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """The fork has the same keys. Pages are shared until one of the two appends to a partial one."""
    call = await admit(request)
    return _made(call, await call.run(Engine.fork, id))


@sequences.delete(
    "/v1/sequences/{id}",
    summary="Drop a sequence",
    status_code=204,
    response_class=Response,
    responses=openapi.CHANGE_RESPONSES,
)
async def drop(request: Request, id: str) -> Response:  # noqa: A002 - the route's parameter
    """Pages that no fork shares are zeroed and free again."""
    call = await admit(request)
    await call.run(Engine.remove, id)
    return Response(status_code=204, headers=server_timing(call.context.stages))


def _made(call: Call, sequence: LiveSequence) -> Response:
    headers = {**server_timing(call.context.stages), "Location": f"/v1/sequences/{sequence.id}"}
    return json_response(_sequence_info(sequence), 201, headers)


def _sequence_info(sequence: LiveSequence) -> SequenceInfo:
    return SequenceInfo(id=sequence.id, length=sequence.length, blocks=blocks_of(sequence.length))


# ---- Profile ----


@scoring.post(
    "/v1/profile",
    summary="Profile a case",
    response_model=ProfileReply,
    responses=openapi.PROFILE_RESPONSES,
    openapi_extra={"requestBody": openapi.CASE_BODY},
)
async def profile(request: Request, options: Annotated[ProfileOptions, Query()]) -> Response:
    """Run a case several times and show each stage's time, and the speed beside the device's own floor.

    The device serves nothing else meanwhile. It ends before a run that would take longer than the deadline
    leaves, or when the client is gone.
    """
    call = await admit(request, form_of_body(request))
    text = await call.run(_profile, call, options)
    return Response(text, headers=server_timing(call.context.stages), media_type=JSON)


def _profile(engine: Engine, _: str, call: Call, options: ProfileOptions) -> bytes:
    case = case_of_body(call.body, call.form)
    check_case(case, engine.limits, scores=options.scores)
    if options.trace:
        check_trace(case)
    profile = profile_case(
        engine.cases,
        case,
        cache=options.cache,
        repeats=options.repeats,
        scores=options.scores,
        trace=options.trace,
        before_run=call.slot.check,
    )
    return to_json(profile)


# ---- Metrics and the page ----


@state_routes.get(
    "/metrics", summary="Prometheus metrics", response_class=Response, responses=openapi.METRICS_RESPONSES
)
async def metrics(request: Request) -> Response:
    """Requests and stages as histograms; the queue and the cache as of this moment."""
    state = state_of(request)
    worker, engine = state.worker, state.engine
    gauges = {
        "ready": ("Whether the self-test passed", float(engine is not None and engine.lost is None)),
        "waiting_calls": ("Calls that wait for the device", float(worker.waiting)),
        "places_taken": ("Requests in the server", float(worker.slots_taken)),
        "places": ("Requests that may be in the server", float(worker.slots)),
        "body_bytes": ("Bytes of the bodies in the server", float(worker.bytes_taken)),
    }
    if engine is not None:
        gauges["pages"] = ("Pages of the cache", float(engine.scorer.num_pages))
        gauges["free_pages"] = ("Pages that no sequence holds", float(engine.scorer.num_free_pages))
        gauges["sequences"] = ("Live sequences", float(engine.sequences.count))
    return Response(state.metrics.exposition(gauges), media_type=CONTENT_TYPE_LATEST)


@state_routes.get("/", summary="The page for people", response_class=HTMLResponse)
async def page() -> Response:
    """Device, backend, cache, latencies, and the last call's score map with its selection."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


ROUTERS = (health, state_routes, scoring, sequences)
