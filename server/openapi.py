"""The OpenAPI document: FastAPI's, with the shared parts it does not know of."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.auth import OPEN_PATHS
from server.documents import FORBIDDEN, JSON_MODELS, PROBLEM_SCHEMA, UNAUTHORIZED

_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "The sparse-attention indexer of MiniMax-M3 over HTTP. Tensors travel as safetensors bodies, small calls "
    "as JSON. Errors are application/problem+json and name the argument. A failed request changes nothing. "
    "Sequences belong to the bearer token that made them."
)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The document of an application's routes."""
    document = get_openapi(
        title="nvfp4-indexer",
        version="1",
        description=_DESCRIPTION,
        routes=app.routes,
    )
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for model in JSON_MODELS:
        schemas[model.__name__] = model.model_json_schema(ref_template=_REF)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = PROBLEM_SCHEMA
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # FastAPI documents its own form of a validation error wherever there is a parameter.
            found = operation["responses"].get("422")
            if found is not None and JSON_TYPE in found.get("content", {}):
                del operation["responses"]["422"]
            if path not in OPEN_PATHS:
                operation["security"] = [{"token": []}, {}]
                operation["responses"]["401"] = UNAUTHORIZED
            operation["responses"]["403"] = FORBIDDEN
    return document


JSON_TYPE = "application/json"
