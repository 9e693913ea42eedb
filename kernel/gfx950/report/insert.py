"""An insert kernel on the interpreter: random keys to scattered slots."""

from __future__ import annotations

import struct

import numpy as np

from kernel.backends.flydsl.key_type import KeyType
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.gfx950.launch import run
from kernel.gfx950.memory import Memory
from kernel.gfx950.parse import parse_program
from kernel.gfx950.report.work import Shape, WorkReport, report_of, work_of

CALL_KEYS = 65_536
_KEYS = 64
_PAGES = 2
_THREADS = 256
_KEYS_A_WORKGROUP = 32
_TOKEN_BYTES = PAGE_BYTES // BLOCK_TOKENS
_SLOT_BYTES = 8


def report_insert(assembly: str, name: str, key_type: KeyType) -> WorkReport:
    """Run a kernel and count.

    Args:
        assembly: the compiler's text, metadata included.
        name: the kernel's symbol.
        key_type: the type of its keys.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    value_bytes = key_type.num_bytes
    random = np.random.default_rng(4)
    values = random.standard_normal((_KEYS, HEAD_DIM)).astype(np.float32)
    # The upper half of a float32 is a bfloat16, and some float16.
    keys = values if value_bytes == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)
    slots = random.permutation(_PAGES * BLOCK_TOKENS)[:_KEYS].astype(np.int64)
    pages = np.empty((_PAGES, PAGE_BYTES), np.uint8)
    memory = Memory()
    inputs = [
        memory.register_array(array, label, writable=False).address
        for array, label in ((keys, "keys"), (slots, "slots"))
    ]
    out = memory.register_array(pages, "pages", initialised=False).address
    kernargs = struct.pack(
        "<6qi", inputs[0], HEAD_DIM * value_bytes, inputs[1], out, PAGE_BYTES, _PAGES * BLOCK_TOKENS, _KEYS
    )
    found = run(
        parse_program(assembly), name, grid=(_KEYS // _KEYS_A_WORKGROUP, 1, 1), block=(_THREADS, 1, 1),
        kernargs=kernargs, memory=memory,
    )  # fmt: skip
    key_bytes = HEAD_DIM * value_bytes + _SLOT_BYTES + _TOKEN_BYTES
    shape = Shape(f"{CALL_KEYS:,} keys", "key", CALL_KEYS, key_bytes)
    return report_of(found, (work_of(shape, found, _KEYS),))
