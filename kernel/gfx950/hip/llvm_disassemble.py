"""Disassembles gfx950 code with an LLVM library; run as a program, so that its LLVM is alone in its process.

FlyDSL and Triton bring an LLVM each, and libraries of one C++ program share their unique symbols.

Usage: ``python llvm_disassemble.py LIBRARY < code``, where code is the bytes of instructions. Writes a line
``offset<tab>instruction`` for each. Imports nothing of this project.
"""

from __future__ import annotations

import ctypes
import sys

TRIPLE, CPU = b"amdgcn-amd-amdhsa", b"gfx950"
# v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]: gfx942 and older do not have it.
ONLY_ON_GFX950 = bytes.fromhex("0000add304190204")
TEXT_BYTES = 256


def main(library: str, code: bytes) -> None:
    llvm = ctypes.CDLL(library)
    for part in (b"TargetInfo", b"Target", b"TargetMC", b"Disassembler"):
        getattr(llvm, (b"LLVMInitializeAMDGPU" + part).decode())()
    chars, pointer, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
    create = llvm.LLVMCreateDisasmCPU
    create.argtypes = [chars, chars, pointer, ctypes.c_int, pointer, pointer]
    create.restype = pointer
    decode = llvm.LLVMDisasmInstruction
    decode.argtypes = [pointer, chars, ctypes.c_uint64, ctypes.c_uint64, chars, size]
    decode.restype = size
    context = create(TRIPLE, CPU, None, 0, None, None)
    if not context:
        raise SystemExit(f"{library} has no AMDGPU disassembler")
    text = ctypes.create_string_buffer(TEXT_BYTES)
    if decode(context, ONLY_ON_GFX950, len(ONLY_ON_GFX950), 0, text, TEXT_BYTES) != len(ONLY_ON_GFX950):
        raise SystemExit(f"{library} does not know gfx950: LLVM 20 or newer is needed")
    at = 0
    while at < len(code):
        size = decode(context, code[at : at + 32], min(32, len(code) - at), at, text, TEXT_BYTES)
        if size == 0:
            raise SystemExit(f"{library}: no gfx950 instruction at byte {at}: {code[at : at + 8].hex()}")
        print(f"{at}\t{text.value.decode().strip()}")
        at += size


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin.buffer.read())
