"""What is written where: whole files, links and pipes that stay, and targets that are refused."""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from client.output import check_output, write_output
from indexer.case.codec import write_atomically
from kernel.errors import InvalidArgumentError


@pytest.fixture
def case(tmp_path: Path) -> str:
    path = tmp_path / "case.st"
    path.write_bytes(b"a case")
    return str(path)


def refused(path: Path, case: str) -> str:
    before = sorted(path.parent.iterdir()) if path.parent.is_dir() else None
    with pytest.raises(InvalidArgumentError) as caught:
        check_output("--out", path, case)
    assert caught.value.argument == "--out"
    assert str(path) in str(caught.value)
    assert "with --out" in caught.value.remedy
    assert before == (sorted(path.parent.iterdir()) if path.parent.is_dir() else None)
    return caught.value.limit


def test_pipe_is_written_into_and_stays(tmp_path: Path, case: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output("--out", pipe, case)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_output("--out", pipe, [b"one ", b"two"])
    reader.join()
    assert read == [b"one two"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_pipe_without_a_name_is_written_into() -> None:
    reading, writing = os.pipe()
    try:
        write_output("--out", Path(f"/proc/self/fd/{writing}"), [b"bytes"])
        assert os.read(reading, 100) == b"bytes"
    finally:
        os.close(reading)
        os.close(writing)


def test_terminal_is_written_into_and_stays(case: str) -> None:
    reading, terminal = os.openpty()
    try:
        path = Path(os.ttyname(terminal))
        check_output("--out", path, case)
        write_output("--out", path, [b"bytes"])
        assert os.read(reading, 100) == b"bytes"
        assert os.path.samestat(path.stat(), os.fstat(terminal))
    finally:
        os.close(reading)
        os.close(terminal)


@pytest.mark.parametrize("exists", [False, True])
def test_link_stays_and_its_target_is_written(exists: bool, tmp_path: Path, case: str) -> None:
    target, link, chain = tmp_path / "there" / "x", tmp_path / "link", tmp_path / "chain"
    target.parent.mkdir()
    link.symlink_to("there/x")
    chain.symlink_to("link")
    if exists:
        target.write_bytes(b"old")
    check_output("--out", chain, case)
    write_output("--out", chain, [b"new"])
    assert chain.is_symlink()
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.read_bytes() == b"new"
    assert [entry.name for entry in target.parent.iterdir()] == ["x"]


def test_socket_is_refused_and_stays(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path("socket")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        assert "regular file" in refused(path, case)
        with pytest.raises(InvalidArgumentError, match="--out = socket: cannot be written"):
            write_output("--out", path, [b"x"])
        assert stat.S_ISSOCK(path.stat().st_mode)


def test_case_itself_is_refused_in_any_spelling(tmp_path: Path, case: str) -> None:
    (tmp_path / "hard").hardlink_to(case)
    (tmp_path / "soft").symlink_to(case)
    (tmp_path / "folder").mkdir()
    for path in (Path(case), tmp_path / "hard", tmp_path / "soft", tmp_path / "folder" / ".." / "case.st"):
        assert refused(path, case) == "is the case itself"


def test_folder_and_what_lies_below_a_file_are_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "below_file").symlink_to("case.st/x")
    for path in (tmp_path, Path(), Path("/")):
        assert refused(path, case) == "is a folder"
    for name in ("case.st/x", "case.st/x/y", "loop", "loop/x", "below_file", "n" * 256):
        assert refused(tmp_path / name, case).startswith("cannot be written: ")


def test_folder_without_permission_is_refused(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write anywhere
    for name in ("old", "new", "deep/new"):
        assert f"no permission to write in {tmp_path}" in refused(tmp_path / name, case)


def test_failed_write_names_the_option_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(InvalidArgumentError) as caught:
        write_output("--out", path, [b"new"])
    assert str(caught.value) == (
        f"--out = {path}: cannot be written: No space left on device; name another file with --out"
    )
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_permissions_of_the_old_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    path.chmod(0o604)
    write_atomically([b"new"], path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_longest_name_is_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        write_output("--out", tmp_path / name, [b"x"])
        assert (tmp_path / name).read_bytes() == b"x"


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x"
    whole = [bytes([letter]) * 100_000 for letter in range(8)]
    with ThreadPoolExecutor(len(whole)) as pool:
        list(pool.map(lambda body: write_output("--out", path, [body]), whole))
    assert path.read_bytes() in whole
    assert [entry.name for entry in path.parent.iterdir()] == ["x"]
