"""Liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.documents import PROBLEM_503
from server.models import Alive, Ready
from server.state import state_of

router = APIRouter(tags=["health"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="Liveness", response_model=Alive)
async def healthz() -> Response:
    """The process answers. It may not be ready."""
    return Response(Alive(status="ok").model_dump_json(), media_type="application/json")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Readiness", response_model=Ready, responses=PROBLEM_503)
async def readyz(request: Request) -> Response:
    """Kernels are compiled and the self-test against the oracle passed."""
    engine = state_of(request).ready_engine()
    ready = Ready(status="ready", backend=engine.scorer.backend, device=str(engine.scorer.device))
    return Response(ready.model_dump_json(), media_type="application/json")
