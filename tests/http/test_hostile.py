"""Bodies that are broken on purpose: always a problem that names something, never a 500, never a change."""

from __future__ import annotations

import json
import struct

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.case import encode_case
from indexer.wire import SequencesCall, decode_reply, encode_container, encode_keys, encode_sequences_call
from kernel.errors import CaseFileError
from server.problems import TITLES, TYPE_PREFIX
from tests.support.http_calls import BINARY, PROBLEM, make_sequence, normals, random_case
from tests.support.live_server import LiveServer

CASE = encode_case(random_case(((200, 3), (1, 1)), 2))
KEYS = b"".join(encode_keys(normals(5, 128)))
CALL = b"".join(encode_sequences_call(SequencesCall(normals(1, 4, 128), ("0123456789abcdef",), (1,))))
TARGETS = {"/v1/score": CASE, "/v1/sequences/{id}/keys": KEYS, "/v1/sequences/score": CALL}


def _check(client: httpx.Client, path: str, body: bytes) -> None:
    reply = client.post(path, content=body, headers={"Content-Type": BINARY})
    if reply.status_code == 200:
        return
    assert reply.status_code in (404, 409, 422), (reply.status_code, body[:200])
    assert reply.headers["content-type"] == PROBLEM
    problem = reply.json()
    assert problem["type"].removeprefix(TYPE_PREFIX) in TITLES
    assert problem["argument"]
    assert len(reply.content) < 4000, "a message repeats no long value"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    target=st.sampled_from(sorted(TARGETS)),
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 2000)),
    tail=st.binary(max_size=8),
)
def test_mutated_bodies(
    server: LiveServer,
    client: httpx.Client,
    target: str,
    edits: list[tuple[int, int]],
    cut: int | None,
    tail: bytes,
) -> None:
    body = bytearray(TARGETS[target])
    header = 8 + int.from_bytes(body[:8], "little")
    for place, value in edits:
        body[place % header] = value
    sequence = "0123456789abcdef"
    _check(client, target.format(id=sequence), bytes(body[:cut]) + tail)
    assert server.process.poll() is None


def _container(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": b"",
    "length past the end": struct.pack("<Q", 2**63) + b"{}",
    "header of a terabyte": struct.pack("<Q", 1 << 40) + b"{}",
    "not JSON": _container(b"{nope"),
    "deep": _container(b'{"a":' * 20000 + b"1" + b"}" * 20000),
    "a number of 10,000 digits": _container(b'{"a":' + b"9" * 10000 + b"}"),
    "metadata bomb": _container({"__metadata__": {str(i): "x" * 100 for i in range(600)}}),
    "metadata that is no string": _container({"__metadata__": {"format": 1}}),
    "overlap": _container({"a": _tensor("F32", [2], 0, 8), "b": _tensor("F32", [2], 4, 12)}, bytes(12)),
    "gap": _container({"a": _tensor("F32", [1], 0, 4), "b": _tensor("F32", [1], 8, 12)}, bytes(12)),
    "shape of 2^120": _container({"index_k": _tensor("F32", [2**40, 2**40, 2**40], 0, 0)}),
    "negative size": _container({"index_k": _tensor("F32", [-1, 128], 0, 0)}),
    "complex dtype": _container({"index_k": _tensor("C64", [1], 0, 8)}, bytes(8)),
    "name twice": _container(b'{"a":{},"a":{}}'),
    "nothing in it": _container({}),
    "bytes after the tensors": KEYS + b"x",
}


@pytest.mark.parametrize("path", sorted(TARGETS))
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_headers(client: httpx.Client, path: str, name: str) -> None:
    sequence = make_sequence(client)
    before = client.get("/v1/cache").json()
    reply = client.post(path.format(id=sequence), content=HOSTILE[name], headers={"Content-Type": BINARY})
    assert reply.status_code == 422, reply.text
    assert reply.json()["argument"]
    assert client.get("/v1/cache").json() == before
    client.delete(f"/v1/sequences/{sequence}")


def test_a_reply_survives_the_codec_and_nothing_else_is_one() -> None:
    with pytest.raises(CaseFileError, match="metadata format"):
        decode_reply(CASE)
    block_ids, scores = np.zeros((4, 3, 2), dtype=np.int32), normals(4, 3, 5)
    metadata = {"format": "nvfp4-indexer-scores", "version": "1"}
    for tensors, argument in (
        ({"num_blocks": np.zeros(3, dtype=np.int32)}, "block_ids"),
        ({"block_ids": block_ids, "num_blocks": np.zeros(2, dtype=np.int32)}, "num_blocks.shape"),
        ({"block_ids": block_ids, "num_blocks": np.zeros(3, dtype=np.int32), "scores": scores[:2]}, "scores"),
    ):
        with pytest.raises(CaseFileError, match=argument):
            decode_reply(b"".join(encode_container(tensors, metadata)))
    for text in ("[]", "x", '{"a":"b"}', "{" * 60000):
        fields = {**metadata, "timings_seconds": text[:60000]}
        tensors = {"block_ids": block_ids, "num_blocks": np.zeros(3, dtype=np.int32)}
        with pytest.raises(CaseFileError, match="timings_seconds"):
            decode_reply(b"".join(encode_container(tensors, fields)))
