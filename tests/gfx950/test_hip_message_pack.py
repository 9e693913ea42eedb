"""The metadata decoder against the format's own encodings, and against every way to cut them short."""

from __future__ import annotations

import pytest

from kernel.gfx950.hip.code_object import Value, decode

CASES: list[tuple[str, Value]] = [
    ("00", 0),
    ("7f", 127),
    ("ff", -1),
    ("e0", -32),
    ("c0", None),
    ("c2", False),
    ("c3", True),
    ("cc80", 128),
    ("cd0100", 256),
    ("ce00010000", 65536),
    ("cf0000000100000000", 2**32),
    ("d080", -128),
    ("d1ff00", -256),
    ("d2ffff0000", -65536),
    ("d3ffffffff00000000", -(2**32)),
    ("a3616263", "abc"),
    ("d903616263", "abc"),
    ("da0003616263", "abc"),
    ("93010203", [1, 2, 3]),
    ("dc0002c3c2", [True, False]),
    ("81a16101", {"a": 1}),
    ("de0001a16190", {"a": []}),
]


@pytest.mark.parametrize(("encoded", "value"), CASES)
def test_decodes(encoded: str, value: Value) -> None:
    assert decode(bytes.fromhex(encoded)) == value
    assert decode(bytes.fromhex(encoded) + b"\0\0") == value, "padding behind the value is ignored"


@pytest.mark.parametrize("encoded", [case[0] for case in CASES])
def test_cut_short(encoded: str) -> None:
    whole = bytes.fromhex(encoded)
    for size in range(len(whole)):
        with pytest.raises(ValueError, match="MessagePack"):
            decode(whole[:size])


def test_refuses_what_metadata_never_holds() -> None:
    for encoded in ("ca00000000", "c401ff", "8190" + "01", "c1"):
        with pytest.raises(ValueError, match="MessagePack"):
            decode(bytes.fromhex(encoded))
