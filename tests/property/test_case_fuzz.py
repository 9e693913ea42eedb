"""Case files of any content: refused by name or read, never anything else, and never at a cost in memory."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.case import decode_case, encode_case
from kernel.errors import CaseFileError
from tests.support.raw_case import edit, join, small_case, small_parts

VALID = encode_case(small_case())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.integers(-2, 2**62) | st.sampled_from((0, 1, 2, 128, 34560, 2**31, 2**32))


def outcome(body: bytes) -> None:
    """Decode; only a :class:`CaseFileError` may leave, and only a little memory may be taken."""
    message = ""
    tracemalloc.start()
    try:
        decode_case(body)
    except CaseFileError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert message.isprintable()
    assert peak < 4 << 20


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_any_json_header_is_refused_or_read(header: object) -> None:
    outcome(join(json.dumps(header).encode(), b"\x00" * 64))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(small_parts()[0])),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(("F32", "I32", "U8", "BF16", "F8_E4M3", "F16", "F64", "")) | JSON,
            "shape": st.lists(SIZES, max_size=5) | JSON,
            "data_offsets": st.lists(SIZES, max_size=3) | JSON,
            "topk": st.text(max_size=8),
        },
    ),
)
def test_any_change_to_an_entry_is_refused_or_read(name: str, change: dict[str, Any]) -> None:
    outcome(edit(lambda header: header[name].update(change)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_flipped_byte_is_refused_or_read(draw: st.DataObject) -> None:
    body = bytearray(VALID)
    for _ in range(draw.draw(st.integers(1, 3))):
        body[draw.draw(st.integers(0, 900))] = draw.draw(st.integers(0, 255))
    outcome(bytes(body))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    outcome(body)
    outcome(join(b"{" + body, b""))
