"""The public surface holds what was recorded: names, signatures, options, routes, settings, metrics, files.

``tests/data/public_surface.json`` is the record, one entry for each thing that a user can rely on. An entry
that is gone or reads otherwise fails; a new one does not. After a deliberate change of the surface:
``python -m tests.unit.test_public_surface tests/data/public_surface.json``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import httpx
import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
RECORD = DATA / "public_surface.json"
Section = dict[str, Any]

PACKAGES = (
    "indexer",
    "client",
    "indexer.case",
    "indexer.distributed",
    "indexer.recording",
    "kernel.gfx950",
    "kernel.gfx950.hip",
)
"""Packages whose ``__all__`` is public."""
DEEP_IMPORTS = {
    "indexer.case": ("read_case", "write_case", "encode_case", "decode_case"),
    "kernel.backends.flydsl": ("toolchain",),
    "kernel.backends.flydsl.runtime": ("launching", "preflight"),
    "kernel.gfx950": ("SCHEDULES",),
    "kernel.gfx950.hip": ("simulated_device",),
    "kernel.plan": ("plan_prefill",),
}
"""What README and docs import or name, by module."""
ERROR_MODULES = ("kernel.errors", "client.errors")
OPEN_PAGES = ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/nothing")


# Python names


def _signature(value: Callable[..., Any]) -> str:
    """Names, kinds and defaults of the arguments; types are mypy's business."""
    words, separated = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not separated:
            words.append("*")
            separated = True
        star = ""
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        separated |= star == "*"
        default = "" if parameter.default is parameter.empty else f"={_plain(parameter.default)}"
        words.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(words)})"


def _plain(value: object) -> str:
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else text


def _bases(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__[1:-1] if not base.__name__.startswith("_")]


def _members(kind: type) -> Section:
    found: Section = {}
    for name in dir(kind):
        if name.startswith("_") or (issubclass(kind, BaseException) and hasattr(OSError, name)):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        found[name] = _signature(value) if inspect.isfunction(value) else "attribute"
    if dataclasses.is_dataclass(kind):
        found |= {field.name: "attribute" for field in dataclasses.fields(kind)}
    return found


def _described(name: str, value: object) -> Section:
    """Entries of one public object: itself, and what it has if it is a class."""
    if isinstance(value, ModuleType):
        return {name: "module"}
    if not inspect.isclass(value):
        return {name: _signature(value) if callable(value) else type(value).__name__}
    init = inspect.getattr_static(value, "__init__")
    found: Section = {name: _signature(value) if inspect.isfunction(init) else "class"}
    if issubclass(value, BaseException):
        found[f"{name} bases"] = [
            base for base in _bases(value) if base not in ("BaseException", "Exception")
        ]
    return found | {f"{name}.{member}": text for member, text in _members(value).items()}


def python_names() -> Section:
    """Everything of the packages' ``__all__`` and the documented deep imports."""
    found: Section = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found |= _described(f"{package}.{name}", getattr(module, name))
    for package, names in DEEP_IMPORTS.items():
        module = importlib.import_module(package)
        for name in names:
            try:
                value = getattr(module, name)
            except AttributeError:
                value = importlib.import_module(f"{package}.{name}")
            found |= _described(f"{package}.{name}", value)
    return found


def error_classes() -> Section:
    """The error classes, their bases, arguments and attributes."""
    found: Section = {}
    for package in ERROR_MODULES:
        for name, value in vars(importlib.import_module(package)).items():
            if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == package:
                found |= _described(f"{package}.{name}", value)
    return found


# The command


def commands() -> Section:
    """Every command's arguments, options and exit codes."""
    import typer

    from client.cli import app

    found: Section = {}

    def walk(path: str, command: Any) -> None:
        codes = sorted({int(code) for code in re.findall(r"\b\d+\b", command.epilog or "")})
        found[path] = {"exit codes": codes, "hidden": command.hidden}
        # The function's own types: click's differ between releases of typer.
        hints = (
            get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
        )
        for parameter in command.params:
            hint = hints.get(parameter.name, bool)
            found[f"{path} {' '.join([*parameter.opts, *parameter.secondary_opts])}"] = {
                "kind": parameter.param_type_name,
                "required": parameter.required,
                "nargs": parameter.nargs,
                "default": repr(getattr(parameter.default, "value", parameter.default)),
                **_type_of_option(hint),
            }
        for name, below in getattr(command, "commands", {}).items():
            walk(f"{path} {name}", below)

    walk("nvfp4-indexer", typer.main.get_command(app))
    return found


def _type_of_option(hint: Any) -> Section:
    described: Section = {}
    if get_origin(hint) is Annotated:
        hint, info = get_args(hint)[:2]
        if (info.min, info.max) != (None, None):
            described["range"] = [info.min, info.max]
    plain = [each for each in get_args(hint) or (hint,) if each is not type(None)]
    choices = [member.value for kind in plain if issubclass(kind, Enum) for member in kind]
    return {**described, **({"choices": choices} if choices else {"type": [kind.__name__ for kind in plain]})}


def settings() -> Section:
    """Every setting of the server: flag, environment variable, type, default and limits."""
    from server.settings import Settings

    prefix = Settings.model_config["env_prefix"]
    return {
        name: {
            "flag": f"--{name.replace('_', '-')}",
            "environment": f"{prefix}{name.upper()}",
            "type": str(field.annotation).replace("pathlib._local", "pathlib"),
            "default": repr(field.default),
            "limits": sorted(repr(limit) for limit in field.metadata),
        }
        for name, field in Settings.model_fields.items()
    }


# HTTP


@cache
def _server() -> tuple[dict[str, Any], str, Section]:
    """The OpenAPI document, the metrics' text and the answers of the open pages of a ready server."""
    return asyncio.run(_ask_server())


async def _ask_server() -> tuple[dict[str, Any], str, Section]:
    from server.app import create_app, new_state
    from server.settings import Settings

    app = create_app(new_state(Settings(backend="cpu", num_pages=64)))
    events: asyncio.Queue[Any] = asyncio.Queue()
    replies: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.ensure_future(app({"type": "lifespan"}, events.get, replies.put))
    await events.put({"type": "lifespan.startup"})
    assert (await replies.get())["type"] == "lifespan.startup.complete"
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8421", timeout=60
    ) as client:
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.02)
        scored = await client.post(
            "/v1/score",
            content=(DATA / "ragged_l15_cut.safetensors").read_bytes(),
            headers={"Content-Type": "application/octet-stream"},
        )
        assert scored.status_code == 200, scored.text
        pages = {}
        for path in OPEN_PAGES:
            got = await client.get(path)
            pages[f"GET {path} answers"] = [got.status_code, got.headers["content-type"]]
        document = (await client.get("/openapi.json")).json()
        text = (await client.get("/metrics")).text
    await events.put({"type": "lifespan.shutdown"})
    await life
    return document, text, pages


def http_operations() -> Section:
    """Routes and methods: operation id, parameters, media types, statuses; what answers on the open pages."""
    document, _, pages = _server()
    found: Section = dict(pages)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parameters = operation.get("parameters", [])
            found[f"{method.upper()} {path}"] = {
                "operation id": operation["operationId"],
                "parameters": sorted(f"{each['in']} {each['name']}" for each in parameters),
                "accepts": sorted(operation.get("requestBody", {}).get("content", {})),
                "answers": {
                    status: sorted(reply.get("content", {}))
                    for status, reply in sorted(operation["responses"].items())
                },
            }
    for name, schema in document["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            required = "required" if field in schema.get("required", []) else "optional"
            found[f"{name}.{field}"] = f"{required}, {described.get('type', 'any')}"
    return found


def problem_types() -> Section:
    """Kinds of problems by their type."""
    from server.problems import TITLES, ProblemError

    found: Section = {}
    for kind in TITLES:
        reply = ProblemError(400, kind, "what happened").response("an id")
        body = json.loads(bytes(reply.body))
        found[body["type"]] = {
            "title": body["title"],
            "media type": reply.media_type,
            "members": sorted(body),
        }
    return found


def metrics() -> Section:
    """Names, types and labels of the server's metrics."""
    _, text, _ = _server()
    found: Section = {}
    for name, kind in re.findall(r"^# TYPE (nvfp4_indexer_\w+) (\w+)$", text, re.MULTILINE):
        samples = re.findall(rf"^{name}(\w*)(?:\{{(.*)\}})? ", text, re.MULTILINE)
        labels = {label for _, pairs in samples for label in re.findall(r"(\w+)=", pairs)}
        found[name] = {
            "type": kind,
            "suffixes": sorted({end for end, _ in samples}),
            "labels": sorted(labels),
        }
    return found


# Case files


def case_files() -> Section:
    """Metadata and tensors that a case file can have."""
    from indexer.case import Case, decode_case, encode_case
    from indexer.case.case import EngineRecord

    engine = EngineRecord(
        block_ids=np.zeros((2, 1, 1), np.int32),
        scores=np.zeros((2, 1, 2), np.float32),
        page_ids=np.arange(2, dtype=np.int32),
        new_keys=np.zeros((1, 128), np.float32),
        layer=3,
    )
    common: dict[str, Any] = {
        "index_q": np.zeros((1, 2, 128), np.float32),
        "cu_seqlens_q": np.array([0, 1], np.int32),
        "seq_lens": np.array([130], np.int32),
        "expected_scores": np.zeros((2, 1, 2), np.float32),
        "expected_block_ids": np.array([[[1]], [[1]]], np.int32),
        "topk": 1,
        "source": "recorded",
    }
    paged = {
        "pages": np.zeros((2, 9216), np.uint8),
        "block_table": np.array([[0, 1]], np.int32),
        "engine": engine,
    }
    found: Section = {}
    for layout in ({"index_k": np.zeros((130, 128), np.float32)}, paged):
        body = encode_case(Case(**common, **layout))
        decode_case(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        fields = header.pop("__metadata__")
        found |= {f"metadata {name}": value for name, value in fields.items()}
        found |= {f"tensor {name}": [entry["dtype"], entry["shape"]] for name, entry in header.items()}
    return found


SECTIONS: dict[str, Callable[[], Section]] = {
    "python names": python_names,
    "error classes": error_classes,
    "commands": commands,
    "settings": settings,
    "http": http_operations,
    "problem types": problem_types,
    "metrics": metrics,
    "case files": case_files,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_everything_recorded_is_still_there(section: str) -> None:
    recorded = json.loads(RECORD.read_text())[section]
    assert recorded
    present = json.loads(json.dumps(SECTIONS[section]()))
    missing = sorted(set(recorded) - set(present))
    changed = [
        f"{name}: was {recorded[name]}, is {present[name]}"
        for name in sorted(set(recorded) & set(present))
        if recorded[name] != present[name]
    ]
    assert not missing, "\n".join(["missing:", *missing])
    assert not changed, "\n".join(["changed:", *changed])


def _text(record: dict[str, Section]) -> str:
    """JSON with a line for each entry."""
    sections = []
    for section, entries in record.items():
        lines = [
            f"  {json.dumps(name)}: {json.dumps(value, sort_keys=True)}"
            for name, value in sorted(entries.items())
        ]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(_text({name: collect() for name, collect in SECTIONS.items()}))
