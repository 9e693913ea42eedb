"""The kernel argument segment, byte for byte."""

from __future__ import annotations

import ctypes
import struct

import pytest

from kernel.gfx950.hip.code_object import Value, decode, kernarg_segment
from kernel.gfx950.program import KernelArgument, KernelMetadata


def params(*values: bytes) -> tuple[int, object]:
    """The address of a ``kernelParams`` array for these argument bytes, and what keeps it alive."""
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    array = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(buffer) for buffer in buffers), None)
    return ctypes.addressof(array), (array, buffers)


METADATA = KernelMetadata(
    "k",
    kernarg_bytes=64,
    arguments=(
        KernelArgument(0, 8, "global_buffer"),
        KernelArgument(8, 2, "by_value"),
        KernelArgument(12, 4, "by_value"),  # behind a gap of two bytes
        KernelArgument(16, 4, "hidden_block_count_x"),
        KernelArgument(20, 4, "hidden_block_count_y"),
        KernelArgument(24, 4, "hidden_block_count_z"),
        KernelArgument(28, 2, "hidden_group_size_x"),
        KernelArgument(30, 2, "hidden_group_size_y"),
        KernelArgument(32, 2, "hidden_group_size_z"),
        KernelArgument(40, 8, "hidden_hostcall_buffer"),
        KernelArgument(48, 2, "hidden_grid_dims"),
    ),
)


@pytest.mark.parametrize(
    ("grid", "dimensions"), [((5, 1, 1), 1), ((5, 6, 1), 2), ((5, 6, 7), 3), ((1, 1, 7), 3)]
)
def test_segment(grid: tuple[int, int, int], dimensions: int) -> None:
    address, _alive = params(struct.pack("<Q", 0x0102030405060708), b"\xaa\xbb", struct.pack("<i", -2))
    segment = kernarg_segment(METADATA, address, grid, (64, 2, 3))
    expected = struct.pack(
        "<Q2s2xi3I3H6xQH14x", 0x0102030405060708, b"\xaa\xbb", -2, *grid, 64, 2, 3, 0, dimensions
    )
    assert segment == expected


def test_too_few_arguments() -> None:
    address, _alive = params(b"\0" * 8, b"\0" * 2)
    with pytest.raises(ValueError, match=r"kernelParams\[2\] of k is null: too few arguments"):
        kernarg_segment(METADATA, address, (1, 1, 1), (64, 1, 1))


# ---- The metadata decoder against the format's own encodings, and against every way to cut them short ----

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
