"""What serves, how full its cache is, and what it did last."""

from __future__ import annotations

import platform
import time
from importlib import metadata

import torch
from fastapi import APIRouter, Request, Response

from kernel.backends import registry
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.page import blocks_of
from server.context import context_of
from server.documents import PROBLEM_503
from server.models import (
    Activity,
    BackendInfo,
    CacheInfo,
    CallMap,
    Info,
    Limits,
    RouteLatency,
    SequenceInfo,
)
from server.score_map import draw
from server.state import state_of

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
