"""The page for people: one file, no outside assets."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

router = APIRouter(tags=["state"])

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
