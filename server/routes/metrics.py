"""Prometheus metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.documents import METRICS_RESPONSES
from server.state import state_of

router = APIRouter(tags=["state"])


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
