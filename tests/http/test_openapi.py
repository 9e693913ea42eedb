"""The OpenAPI document, and random requests made from it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import httpx

from tests.support.live_server import LiveServer

ROUTES = {
    ("/healthz", "get"),
    ("/readyz", "get"),
    ("/v1/info", "get"),
    ("/v1/score", "post"),
    ("/v1/sequences", "post"),
    ("/v1/sequences/score", "post"),
    ("/v1/sequences/{id}", "get"),
    ("/v1/sequences/{id}", "delete"),
    ("/v1/sequences/{id}/keys", "post"),
    ("/v1/sequences/{id}/fork", "post"),
    ("/v1/cache", "get"),
    ("/v1/activity", "get"),
    ("/v1/profile", "post"),
    ("/metrics", "get"),
    ("/", "get"),
}


def test_every_route_and_error_is_documented(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    operations = {(path, verb): op for path, verbs in document["paths"].items() for verb, op in verbs.items()}
    assert set(operations) == ROUTES
    for (path, verb), operation in operations.items():
        assert operation["summary"]
        assert operation["description"]
        for status, reply in operation["responses"].items():
            if int(status) >= 400:
                assert list(reply["content"]) == ["application/problem+json"], (path, verb, status)
    for path in ("/v1/score", "/v1/sequences/score", "/v1/sequences/{id}/keys", "/v1/profile"):
        operation = operations[path, "post"]
        assert {"413", "415", "422", "429", "503", "504"} <= set(operation["responses"])
        content = operation["requestBody"]["content"]
        assert content["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
        assert content["application/json"]["examples"]
    assert {"404", "409"} <= set(operations["/v1/sequences/{id}/keys", "post"]["responses"])


def test_the_examples_are_accepted(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path in ("/v1/score", "/v1/profile?repeats=1"):
        content = document["paths"][path.partition("?")[0]]["post"]["requestBody"]["content"]
        example = content["application/json"]["examples"]["small"]["value"]
        reply = client.post(path, json=example)
        assert reply.status_code == 200, reply.text


def test_schemathesis_finds_nothing(server: LiveServer, tmp_path: Path) -> None:
    command = Path(sysconfig.get_path("scripts")) / "schemathesis"
    assert command.exists(), "the test extra installs schemathesis"
    (tmp_path / "schemathesis.toml").write_text("", encoding="utf-8")
    done = subprocess.run(
        [
            str(command),
            "run",
            f"{server.url}/openapi.json",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method",
            "--max-examples=12",
            "--request-timeout=120",
            "--phases=examples,coverage,fuzzing",
            "--seed=7",
            "--generation-database=none",
            "--no-color",
        ],
        cwd=tmp_path,
        env={**os.environ, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.process.poll() is None
