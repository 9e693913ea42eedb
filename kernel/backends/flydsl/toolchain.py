"""What compiling needs: FlyDSL for gfx950, its linker, and its cache. No GPU and no HIP."""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

from kernel.backends.flydsl import kernel_cache, kernel_names, linker
from kernel.backends.flydsl.decode_layout import LAYOUTS
from kernel.backends.flydsl.key_type import KeyType
from kernel.backends.flydsl.runtime import TARGET
from kernel.backends.flydsl.topk_variants import VARIANTS
from kernel.contract import SUPPORTED_HEADS
from kernel.errors import DeviceUnavailableError


def check() -> str:
    """What compiling needs, changing nothing: neither the environment nor the disk.

    Returns:
        What was found, for people.

    Raises:
        DeviceUnavailableError: FlyDSL or a linker is missing, or the environment asks for another
            architecture.
    """
    if importlib.util.find_spec("flydsl") is None:
        raise DeviceUnavailableError("the package flydsl is not installed", "pip install flydsl==0.5.0")
    asked = os.environ.get("FLYDSL_GPU_ARCH", TARGET)
    if asked.split(":")[0] != TARGET:
        raise DeviceUnavailableError(
            f"FLYDSL_GPU_ARCH={asked}, and the kernels are for {TARGET}", "unset FLYDSL_GPU_ARCH"
        )
    return f"linker {linker.check()}"


def prepare() -> None:
    """Have FlyDSL compile for gfx950, before ``flydsl`` is imported: its default is gfx942.

    Raises:
        DeviceUnavailableError: see :func:`check`; or the linker's cache folder cannot be written.
    """
    check()
    os.environ.setdefault("FLYDSL_GPU_ARCH", TARGET)
    linker.prepare()


def compile_kernels(cache_dir: Path | None = None) -> list[str]:
    """Compile every kernel into FlyDSL's cache, so that no process compiles at its first call.

    The cache is bound to the ROCm installation: compile where the kernels will run, in the final image.

    Args:
        cache_dir: the cache; a process that is to use it needs FLYDSL_RUNTIME_CACHE_DIR set to it. FlyDSL's
            own choice when None.

    Returns:
        The kernels' names.

    Raises:
        CompileError: LLVM refused a kernel.
        DeviceUnavailableError: see :func:`prepare`; or the cache cannot be written.
    """
    settings = {kernel_cache.ENABLE: "1"}
    if cache_dir is not None:
        settings[kernel_cache.FOLDER] = str(cache_dir)
    return _compiled(None, kernel_names.every(), settings)


def export_kernels(objects: Path, names: Iterable[str]) -> list[str]:
    """Compile kernels to a folder's ``NAME.o`` and ``NAME.h``, for a library; FlyDSL's cache is used.

    Args:
        objects: the folder.
        names: of :func:`kernel.backends.flydsl.kernel_names.every`.

    Returns:
        The names, in the order of all kernels.

    Raises:
        CompileError: LLVM refused a kernel.
        DeviceUnavailableError: see :func:`prepare`; or the cache cannot be written.
    """
    return _compiled(objects, names, {})


def assembly(name: str) -> str:
    """Compile a kernel afresh, past FlyDSL's cache.

    Args:
        name: of :func:`kernel.backends.flydsl.kernel_names.every`.

    Returns:
        The compiler's assembly text, which is the binary: assembled again it gives the same bytes.

    Raises:
        CompileError: LLVM refused a kernel.
        DeviceUnavailableError: see :func:`prepare`; or there was no room for the text.
    """
    compile_kernel = _compilers()[name]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "COMPILE_ONLY": "1",
            kernel_cache.RUN_ONLY: "0",
            kernel_cache.ENABLE: "0",
            "FLYDSL_DEBUG_DUMP_ASM": "1",
            "FLYDSL_DUMP_DIR": folder,
        }
        with _environment(settings), redirect_stdout(io.StringIO()):  # FlyDSL prints where it dumps
            compile_kernel()
        texts = list(Path(folder).rglob("*.s"))  # FlyDSL goes on without where it cannot write
        if len(texts) != 1:
            raise DeviceUnavailableError(
                f"FlyDSL wrote no assembly of {name}", f"set TMPDIR to a folder with room, not {folder}"
            )
        return texts[0].read_text()


def _compiled(objects: Path | None, names: Iterable[str], settings: dict[str, str]) -> list[str]:
    kernels, wanted = _compilers(objects), set(names)
    with _environment({"COMPILE_ONLY": "1", kernel_cache.RUN_ONLY: "0"} | settings):
        if objects is None:
            kernel_cache.check_named()
        kernel_cache.prepare()
        return [compile_kernel() for name, compile_kernel in kernels.items() if name in wanted]


def _compilers(objects: Path | None = None) -> dict[str, Callable[[], str]]:
    """What compiles each kernel, by its name, which it returns."""
    prepare()
    from kernel.backends.flydsl import insert, score_decode, score_prefill, topk

    return {
        **{
            kernel_names.score_prefill(h): partial(score_prefill.compile_for, h, objects)
            for h in SUPPORTED_HEADS
        },
        **{
            kernel_names.score_decode(h, layout): partial(score_decode.compile_for, h, objects, layout)
            for layout in LAYOUTS
            for h in SUPPORTED_HEADS
        },
        **{variant.name: partial(topk.compile_for, variant, objects) for variant in VARIANTS},
        **{kernel_names.insert(one): partial(insert.compile_for, one, objects) for one in KeyType},
    }


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
