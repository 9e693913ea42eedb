"""Making the kernel library where something is wrong: named, and a library that is there stays."""

from __future__ import annotations

import importlib.util
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from kernel.backends.flydsl import geometry, kernel_library, library_export
from kernel.backends.flydsl.backend import FlydslBackend
from kernel.backends.flydsl.kernel_library import FILE_NAME, VARIABLE
from kernel.backends.flydsl.library_export import export_library
from kernel.backends.reference import ReferenceBackend
from kernel.errors import DeviceUnavailableError, InvalidArgumentError
from kernel.gfx950.hip import simulated_device
from tests.gfx950 import exported
from tests.support.compare import assert_same_bits
from tests.support.process import printed_by


@pytest.mark.parametrize("kernels", [("score_prefill_h4", "score_prefil_h2"), ()])
def test_a_kernel_that_there_is_not(kernels: tuple[str, ...], tmp_path: Path) -> None:
    named = "'score_prefil_h2'" if kernels else "none"
    with pytest.raises(InvalidArgumentError, match=f"^kernels = {named}: must be some of") as caught:
        export_library(tmp_path / "new", kernels)
    assert set(geometry.kernel_names()) <= set(caught.value.limit.replace(",", "").split())
    assert not (tmp_path / "new").exists()


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("flydsl", "ziglang") else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceUnavailableError) as caught:
        export_library(tmp_path / "new")
    for part in (
        "the package flydsl is not installed",
        "no C compiler (cc, gcc, clang) is on the path",
        "FlyDSL's export needs ld.lld or ld and llvm-objcopy or objcopy on the path",
    ):
        assert part in caught.value.reason
    for part in (
        "pip install flydsl==0.5.0",
        "install gcc or clang",
        "install binutils, or put ROCm's llvm/bin",
    ):
        assert part in caught.value.remedy
    assert not (tmp_path / "new").exists()


def test_one_tool_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cc", "ld"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceUnavailableError) as caught:
        library_export.check()
    assert "needs llvm-objcopy or objcopy on the path" in caught.value.reason
    assert "C compiler" not in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DeviceUnavailableError, match=r"cannot be made in .*Not a directory.*; name a folder"):
        export_library(file / "under")


FULL = """
import resource, sys
from pathlib import Path
from kernel.backends.flydsl.library_export import export_library
from kernel.errors import DeviceUnavailableError

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    export_library(Path(sys.argv[1]), ["insert_bf16"])
except DeviceUnavailableError as error:
    print(error)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A limit of a file's size stands for the disk's."""
    library = tmp_path / FILE_NAME
    library.write_bytes(b"an older library")
    printed = printed_by("-c", FULL, tmp_path, "25000")
    assert "FlyDSL cannot export insert_bf16" in printed
    assert f"see that {tmp_path} and " in printed
    assert library.read_bytes() == b"an older library"
    assert list(tmp_path.iterdir()) == [library]


def test_a_compiler_that_fails_to_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / FILE_NAME
    library.write_bytes(b"an older library")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(DeviceUnavailableError, match=r"^false -shared \.\.\. failed: exit code 1; set CC to"):
        export_library(tmp_path, ["insert_bf16"])
    assert library.read_bytes() == b"an older library"
    assert list(tmp_path.iterdir()) == [library]


def test_a_library_that_is_in_use_is_replaced_at_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps what it loaded, and refuses the new one: the dynamic loader would mix the two up."""
    path = tmp_path / FILE_NAME
    shutil.copy(exported.library(tmp_path_factory), path)
    monkeypatch.setenv(VARIABLE, str(path))
    backend = FlydslBackend("flydsl-sim", simulated_device(), "exact")
    assert export_library(tmp_path, ["insert_fp16"]) == (path, ["insert_fp16"])
    assert list(tmp_path.iterdir()) == [path]
    keys = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found, expected = torch.zeros(2, 1, 9216, dtype=torch.uint8)
    for one, pages in ((backend, found), (ReferenceBackend(), expected)):
        one.insert(keys, pages, torch.arange(9))
    assert_same_bits(found, expected)
    with pytest.raises(DeviceUnavailableError, match=f"{path} was replaced after .*; start a new process"):
        FlydslBackend("flydsl-sim", simulated_device(), "exact")
    assert list(kernel_library.check(path).kernels) == ["insert_fp16"]
