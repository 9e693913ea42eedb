"""Compiling the kernels without a GPU or HIP: FlyDSL's linker and settings, cache filling, export, assembly
text."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import LAYOUTS, VARIANTS, KeyType, Launch
from kernel.backends.flydsl.runtime import TARGET
from kernel.contract import SUPPORTED_HEADS
from kernel.errors import DeviceUnavailableError

# ---- FlyDSL's cache of compiled kernels: errors that name a remedy; FlyDSL's own do not ----
#
# FLYDSL_RUNTIME_CACHE_DIR is the folder, FLYDSL_RUNTIME_ENABLE_CACHE=0 does without, and
# FLYDSL_RUNTIME_RUN_ONLY=1 loads from it and never compiles.

CACHE_FOLDER = "FLYDSL_RUNTIME_CACHE_DIR"
RUN_ONLY = "FLYDSL_RUNTIME_RUN_ONLY"
CACHE_ENABLE = "FLYDSL_RUNTIME_ENABLE_CACHE"
_CACHE_ENTRY = "score_prefill"
"""FlyDSL keeps a folder for each launched function's name."""
_TRUE = ("1", "true", "yes", "on")


def check_cache() -> None:
    """Checks that the cache can be used, changing nothing.

    Raises:
        DeviceUnavailableError: compiling is forbidden and no kernel is in the cache, or the cache cannot be
            written.
    """
    folder = _cache_folder()
    if _is_set(RUN_ONLY, default=False):
        _check_filled(folder)
    if folder is None:
        return
    if _is_filled(folder):
        # FlyDSL reads a kernel under a lock file, which it opens for writing.
        for lock in (folder / _CACHE_ENTRY).glob("*.lock"):
            if not os.access(lock, os.W_OK):
                raise unusable_cache(f"{lock} cannot be written")
        return
    existing = folder / _CACHE_ENTRY
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise unusable_cache(f"{existing} is no folder")
    if not os.access(existing, os.W_OK):
        raise unusable_cache(f"{existing} cannot be written")


def prepare_cache() -> None:
    """Make the folder.

    Raises:
        DeviceUnavailableError: see :func:`check`.
    """
    check_cache()
    folder = _cache_folder()
    if folder is None or _is_filled(folder):
        return
    try:
        (folder / _CACHE_ENTRY).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / _CACHE_ENTRY):
            pass
    except OSError as error:
        raise unusable_cache(str(error)) from error


def check_cache_named() -> None:
    """Checks that there is a cache to compile into.

    Raises:
        DeviceUnavailableError: there is none.
    """
    if _cache_folder() is None:
        raise DeviceUnavailableError(
            f"{CACHE_FOLDER} is empty: there is no cache to compile into",
            f"name a folder: `nvfp4-indexer kernel compile --cache DIR`, or unset {CACHE_FOLDER}",
        )


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Context of FlyDSL's compiler that names its errors about the cache.

    Args:
        name: the kernel.

    Raises:
        DeviceUnavailableError: compiling is forbidden and this kernel is not in the cache, or the cache
            cannot be written.
    """
    try:
        yield
    except RuntimeError as error:
        if RUN_ONLY not in str(error):
            raise
        raise _missing(f"no {name} of this version and toolchain") from error
    except OSError as error:
        folder = _cache_folder()
        if (
            folder is None
            or error.filename is None
            or folder not in Path(os.fsdecode(error.filename)).parents
        ):
            raise
        raise unusable_cache(str(error)) from error


def unusable_cache(reason: str) -> DeviceUnavailableError:
    """The error that the cache cannot be written."""
    return DeviceUnavailableError(
        f"{CACHE_FOLDER}={_cache_folder()}: the cache of compiled kernels cannot be used: {reason}",
        f"set {CACHE_FOLDER} to a folder that can be written and has room, or {CACHE_ENABLE}=0 to compile "
        "in every process",
    )


def _check_filled(folder: Path | None) -> None:
    if folder is None:
        raise DeviceUnavailableError(
            f"{RUN_ONLY}={os.environ[RUN_ONLY]} forbids compiling, and {CACHE_FOLDER} is empty: "
            "there is no cache",
            f"set {CACHE_FOLDER} to a folder and run `nvfp4-indexer kernel compile`, or unset {RUN_ONLY}",
        )
    if not _is_filled(folder):
        raise _missing("no kernel")


def _is_filled(folder: Path) -> bool:
    return any((folder / _CACHE_ENTRY).glob("*.pkl"))


def _missing(what: str) -> DeviceUnavailableError:
    folder = _cache_folder()
    return DeviceUnavailableError(
        f"{RUN_ONLY}={os.environ.get(RUN_ONLY, '')} forbids compiling, and {CACHE_FOLDER}={folder} "
        f"holds {what}",
        f"run `nvfp4-indexer kernel compile --cache {folder}`, or unset {RUN_ONLY}",
    )


def _cache_folder() -> Path | None:
    """The cache; None where it is disabled."""
    if not _is_set(CACHE_ENABLE, default=True) and not _is_set(RUN_ONLY, default=False):
        return None
    named = os.environ.get(CACHE_FOLDER)
    if named is None:
        return Path.home() / ".flydsl" / "cache"
    return Path(named) if named else None


def _is_set(variable: str, *, default: bool) -> bool:
    value = os.environ.get(variable)
    return default if value is None else value.lower() in _TRUE


# ---- The linker that FlyDSL runs, $ROCM_PATH/llvm/bin/ld.lld ----
#
# A ROCm image has it. Elsewhere any LLD does: a folder of that shape is made in the user's cache and named by
# ROCM_PATH.

_OLDEST_LLVM = 19
"""The oldest LLD known to link FlyDSL's code objects, of version 6."""
_NEWEST_LLVM = 30
"""The newest of Debian's packages that is looked for."""
_IN_TOOLKIT = Path("llvm", "bin", "ld.lld")


def check_linker() -> str:
    """The linker that :func:`prepare` will choose, human-readable; changes nothing.

    Raises:
        DeviceUnavailableError: none was found.
    """
    root = _rocm()
    return str(Path(root, _IN_TOOLKIT)) if root else shlex.join(linker_command())


def prepare_linker() -> None:
    """Set ROCM_PATH to a folder that has a linker.

    Raises:
        DeviceUnavailableError: no linker was found, or the cache folder cannot be written.
    """
    os.environ["ROCM_PATH"] = _rocm() or str(_toolkit(linker_command()))


def _rocm() -> str | None:
    """A ROCm installation with a linker."""
    roots = (os.environ.get("ROCM_PATH"), "/opt/rocm")
    return next((root for root in roots if root and Path(root, _IN_TOOLKIT).is_file()), None)


def linker_command() -> list[str]:
    """The command of an LLD outside ROCm: on the path, in Debian's folders, in the ``ziglang`` package.

    Raises:
        DeviceUnavailableError: there is none.
    """
    versions = range(_NEWEST_LLVM, _OLDEST_LLVM - 1, -1)
    for name in ("ld.lld", *(f"/usr/lib/llvm-{version}/bin/ld.lld" for version in versions)):
        path = shutil.which(name)
        if path is not None and _lld_version(path) >= _OLDEST_LLVM:
            return [path]
    zig = importlib.util.find_spec("ziglang")
    for folder in (zig.submodule_search_locations or []) if zig else []:
        if Path(folder, "zig").is_file():
            return [str(Path(folder, "zig")), "ld.lld"]
    raise DeviceUnavailableError(
        f"FlyDSL needs ld.lld of LLVM {_OLDEST_LLVM} or newer: none is in $ROCM_PATH/llvm/bin or on the path",
        "pip install ziglang, apt install lld-19, or set ROCM_PATH to a ROCm installation",
    )


def _lld_version(program: str) -> int:
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(r"LLD (\d+)", shown)
    return int(version[1]) if version else 0


def _toolkit(linker: list[str]) -> Path:
    """A folder with ``llvm/bin/ld.lld``, a script that runs ``linker``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    key = hashlib.sha256(shlex.join(linker).encode()).hexdigest()[:16]
    root = Path(cache if cache else Path.home() / ".cache") / "nvfp4-indexer" / "rocm-toolkit" / key
    script = root / _IN_TOOLKIT
    if not script.is_file():
        try:
            script.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=script.parent) as scratch:
                written = Path(scratch, script.name)
                written.write_text(f'#!/bin/sh\nexec {shlex.join(linker)} "$@"\n')
                written.chmod(0o700)
                written.replace(script)  # atomic: a process that looks meanwhile sees all of it or nothing
        except OSError as error:
            raise DeviceUnavailableError(
                f"the folder {root} for FlyDSL's linker cannot be made: {error}",
                "set XDG_CACHE_HOME to a folder that can be written",
            ) from error
    return root


def check() -> str:
    """Checks what compiling needs; changes neither the environment nor the disk.

    Returns:
        What was found, human-readable.

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
    return f"linker {check_linker()}"


def prepare() -> None:
    """Sets FlyDSL up for gfx950, before ``flydsl`` is imported: its default is gfx942.

    Raises:
        DeviceUnavailableError: see :func:`check`; or the linker's cache folder cannot be written.
    """
    check()
    os.environ.setdefault("FLYDSL_GPU_ARCH", TARGET)
    prepare_linker()


def compile_kernels(cache_dir: Path | None = None) -> list[str]:
    """Compile every kernel into FlyDSL's cache, so that no process compiles at its first call.

    The cache is bound to the ROCm installation: compile where the kernels will run, in the final image.

    Args:
        cache_dir: the cache, FlyDSL's own choice when None; a process uses it with FLYDSL_RUNTIME_CACHE_DIR
            set to it.

    Returns:
        The kernels' names.

    Raises:
        CompileError: LLVM refused a kernel.
        DeviceUnavailableError: see :func:`prepare`; or the cache cannot be written.
    """
    settings = {CACHE_ENABLE: "1"}
    if cache_dir is not None:
        settings[CACHE_FOLDER] = str(cache_dir)
    return _compiled(None, geometry.kernel_names(), settings)


def export_kernels(objects: Path, names: Iterable[str]) -> list[str]:
    """Compile kernels to a folder's ``NAME.o`` and ``NAME.h``, for a library; FlyDSL's cache is used.

    Args:
        objects: the folder.
        names: of :func:`kernel.backends.flydsl.geometry.kernel_names`.

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
        name: of :func:`kernel.backends.flydsl.geometry.kernel_names`.

    Returns:
        The compiler's assembly text: the same passes as a code object's, printed instead of encoded.

    Raises:
        CompileError: LLVM refused a kernel.
        DeviceUnavailableError: see :func:`prepare`.
    """
    build = _builds()[name]
    from kernel.backends.flydsl import jit

    with _environment({"COMPILE_ONLY": "1", RUN_ONLY: "0", CACHE_ENABLE: "0"}):
        return jit.assembly(build(), name)


def _compiled(objects: Path | None, names: Iterable[str], settings: dict[str, str]) -> list[str]:
    builds, wanted = _builds(), set(names)
    from kernel.backends.flydsl.jit import compile_ahead

    with _environment({"COMPILE_ONLY": "1", RUN_ONLY: "0"} | settings):
        if objects is None:
            check_cache_named()
        prepare_cache()
        return [compile_ahead(build(), name, objects) for name, build in builds.items() if name in wanted]


def _builds() -> dict[str, Callable[[], Launch]]:
    """FlyDSL's launcher of every kernel by name, not yet made."""
    prepare()
    from kernel.backends.flydsl import decode, insert, prefill, topk

    return {
        **{geometry.prefill_name(h): partial(prefill.build, h) for h in SUPPORTED_HEADS},
        **{
            geometry.decode_name(h, layout): partial(decode.build, h, layout)
            for layout in LAYOUTS
            for h in SUPPORTED_HEADS
        },
        **{variant.name: partial(topk.build, variant) for variant in VARIANTS},
        **{geometry.insert_name(key_type): partial(insert.build, key_type) for key_type in KeyType},
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
