"""Compile the Triton kernels for a device that is not there.

python -m tests.support.compiled cuda:90 [KERNEL_LEFT_OUT ...]
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernel.backends.triton import decode as triton_decode
from kernel.backends.triton import insert, prefill, topk, topk_many
from kernel.backends.triton.hopper import decode as hopper_decode
from kernel.backends.triton.hopper import insert as hopper_insert
from kernel.backends.triton.hopper import prefill as hopper_prefill

POINTERS = {
    "q_ptr": "*u8",
    "pages_ptr": "*u8",
    "lut_ptr": "*u8",
    "slots_ptr": "*i64",
    "table_cells_ptr": "*i64",
    "table_of_scales_ptr": "*i64",
    "scores_ptr": "*fp32",
    "maxima_ptr": "*fp32",
    "list_ptr": "*i64",
    "entries_ptr": "*i64",
}
"""Types of pointers by their argument's name; others are to int32, and what is no pointer is an int32."""
HOPPER = "cuda:90"
LEFT_OUT = sys.argv[2:]


def compile_kernel(
    kernel: Any, target: GPUTarget, constants: dict[str, Any], types: dict[str, str], warps: int = 4
) -> None:
    """Compile one kernel."""
    if kernel.fn.__name__ in LEFT_OUT:
        return
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = types.get(name, POINTERS.get(name, pointer))
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    triton.compile(
        source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=target,
        options={"num_warps": warps},
    )


def compile_all(name: str) -> None:
    """Compile what a device of that name runs."""
    backend, arch = name.split(":")
    cuda = backend == "cuda"
    target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    ptx = name == HOPPER
    for exact in (True, False) if ptx else (True,):
        keys = {"keys_ptr": "*fp16" if exact else "*u8"}
        compile_kernel(prefill._dequantize_kernel, target, {"EXACT": exact, "PTX": ptx}, keys)
        score = {"SPLITS": 2, "H": 4, "GROUPED": True, "EXACT": exact, "STAGES": 2}
        of_decode = {"H": 1, "N": 16, "BATCH": 32, "GROUPED": True, "EXACT": exact, "STAGES": 2}
        compile_kernel(prefill._score_kernel, target, score | {"PTX": ptx}, keys, 8)
        compile_kernel(triton_decode._decode_kernel, target, of_decode | {"PTX": ptx}, {})
        if ptx:
            element = gl.float16 if exact else gl.float8e4nv
            layout = gl.NVMMASharedLayout.get_default_for([256, 128], element)
            descriptor = f"tensordesc<{'fp16' if exact else 'fp8e4nv'}[256,128],{layout!r}>"
            compile_kernel(hopper_prefill.score_kernel, target, score, {"keys_desc": descriptor})
            compile_kernel(hopper_decode.decode_kernel, target, of_decode, {})
    compile_kernel(insert._insert_kernel, target, {"KEYS": 64, "PTX": cuda}, {"keys_ptr": "*bf16"})
    if ptx:
        keys = {"keys_ptr": "*bf16"}
        compile_kernel(hopper_insert.insert_kernel, target, {"KEYS": 32, "WARPS": 8}, keys, 8)
    compile_kernel(topk_many.maxima_kernel, target, {"ROWS": 32, "GROUPS": 16}, {}, 8)
    rows = {"H": 4, "BY_BLOCK": False, "GROUPED": True}
    few = rows | {"BATCH": 32, "GROUPS": 256, "PARTS": 64, "PLACES": 16, "LISTED": 64, "PDL": ptx}
    compile_kernel(topk.few_rows_kernel, target, few, {})
    many = rows | {"PADDED": True, "ROWS": 32}
    compile_kernel(topk_many.many_rows_kernel, target, many, {}, 1)


if __name__ == "__main__":
    compile_all(sys.argv[1])
    print(f"compiled for {sys.argv[1]}")
