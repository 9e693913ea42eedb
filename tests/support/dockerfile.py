"""A Dockerfile as instructions, and its install and compile steps run without a Docker engine.

What Docker would do in an image's file system is done under a folder that stands for the image's own folder:
every mention of that folder in the file is read as the stand-in. Each stage has a folder and variables of its
own; what steps install goes to the one environment of the process. Steps that set the operating system up
(accounts) are left out, everything else of the file is executed as it stands.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IMAGE_FOLDER = "/opt/nvfp4-indexer"
"""Where the images have the project."""
SYSTEM_STEPS = ("groupadd", "useradd")
"""Commands of steps that change a machine's accounts, which a test must not."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined."""

    keyword: str
    value: str


def instructions(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", "", "\n".join(lines))
    found = []
    for line in text.splitlines():
        if line.strip():
            keyword, _, value = line.strip().partition(" ")
            found.append(Instruction(keyword.upper(), value.strip()))
    return found


def last(found: Sequence[Instruction], keyword: str) -> str:
    """The value of a keyword's last instruction, which is the one that counts."""
    return [instruction.value for instruction in found if instruction.keyword == keyword][-1]


def exec_form(value: str) -> list[str]:
    """The words of an instruction in exec form."""
    words = json.loads(value)
    assert isinstance(words, list)
    return [str(word) for word in words]


def environment_of(value: str) -> dict[str, str]:
    """The variables of an ENV instruction."""
    pairs = (word.partition("=") for word in shlex.split(value))
    return {name: text for name, _, text in pairs}


def ignored(patterns: Sequence[str], path: str) -> bool:
    """Whether a .dockerignore keeps a file out of the build: its last pattern that matches decides."""
    out = False
    for pattern in patterns:
        keeps = pattern.startswith("!")
        wanted = pattern.lstrip("!")
        parts = path.split("/")
        if wanted.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, wanted[3:]) for part in parts)
        else:
            folders = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
            matches = any(fnmatch.fnmatch(folder, wanted) for folder in folders)
        if matches:
            out = not keeps
    return out


def ignore_patterns(root: Path) -> list[str]:
    """The patterns of a repository's .dockerignore."""
    lines = (root / ".dockerignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@dataclass
class _Stage:
    folder: Path
    environment: dict[str, str]
    shell: list[str]


class Build:
    """Executes a Dockerfile's steps in a folder.

    Args:
        path: the Dockerfile.
        context: the repository.
        folder: stands for :data:`IMAGE_FOLDER` in the last stage; other stages' folders lie beside it.
        environment: of the process, as the base image would have it: what ``python3`` is, above all.
        arguments: build arguments.
    """

    def __init__(
        self,
        path: Path,
        context: Path,
        folder: Path,
        environment: Mapping[str, str],
        arguments: Mapping[str, str],
    ) -> None:
        self.environment = dict(environment)
        self.steps: list[str] = []
        self._path = path
        self._context = context
        self._last_folder = folder
        self._base = _Stage(folder, dict(environment), ["/bin/sh", "-c"])
        self._arguments = dict(arguments)

    def run(self, only: str | None = None) -> None:
        """Execute the file from its first instruction to its last.

        Args:
            only: the RUN steps that are executed must have this word; None: all.
        """
        found = instructions(self._path)
        num_stages = sum(instruction.keyword == "FROM" for instruction in found)
        stages: dict[str, _Stage] = {}
        stage = self._base
        for instruction in found:
            if instruction.keyword == "FROM":
                stage = self._stage(instruction.value, stages, last=len(stages) == num_stages - 1)
                continue
            value = instruction.value.replace(IMAGE_FOLDER, str(stage.folder))
            if instruction.keyword == "SHELL":
                stage.shell = exec_form(value)
            elif instruction.keyword == "ENV":
                stage.environment.update(environment_of(value))
            elif instruction.keyword == "ARG":
                name, _, default = value.partition("=")
                stage.environment[name] = self._arguments.get(name, default)
            elif instruction.keyword == "COPY":
                if not value.startswith("--from="):
                    self._copy(stage, value)
                else:
                    _copy_from(stages, stage, instruction.value, whole=only is None)
            elif instruction.keyword == "RUN":
                system = any(command in value for command in SYSTEM_STEPS)
                if not system and (only is None or only in value):
                    self._step(stage, value)
        self.environment = stage.environment

    def _stage(self, value: str, stages: dict[str, _Stage], *, last: bool) -> _Stage:
        """A stage begins, and is entered among the others by its name."""
        base, _, name = value.partition(" AS ")
        name = name or f"stage {len(stages)}"
        folder = (
            self._last_folder if last else self._last_folder.with_name(f"{self._last_folder.name}-{name}")
        )
        parent = stages.get(base)
        stages[name] = (
            _Stage(folder, dict(self._base.environment), list(self._base.shell))
            if parent is None
            else _Stage(folder, dict(parent.environment), list(parent.shell))
        )
        folder.mkdir(exist_ok=True)
        if parent is not None:
            shutil.copytree(parent.folder, folder, dirs_exist_ok=True)
        return stages[name]

    def _step(self, stage: _Stage, command: str) -> None:
        self.steps.append(command)
        done = subprocess.run(
            [*stage.shell, command],
            cwd=stage.folder,
            env=stage.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"exit code {done.returncode} of {command}\n{done.stdout}\n{done.stderr}")

    def _copy(self, stage: _Stage, value: str) -> None:
        *sources, target = shlex.split(value)
        patterns = ignore_patterns(self._context)
        for source in sources:
            path = self._context / source
            found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            kept = [file for file in found if not ignored(patterns, str(file.relative_to(self._context)))]
            if not kept:
                raise AssertionError(f"COPY {value}: {source} has nothing that .dockerignore lets in")
            for file in kept:
                inside = file.name if file == path else str(file.relative_to(path))
                place = stage.folder / target / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)


def _copy_from(stages: Mapping[str, _Stage], stage: _Stage, value: str, *, whole: bool) -> None:
    """``--from=NAME FILE... FOLDER/``: files of another stage; of a step that was left out there are none."""
    option, *sources, target = shlex.split(value)
    other = stages[option.removeprefix("--from=")]
    folder = stage.folder / target.replace(IMAGE_FOLDER, str(stage.folder))
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        path = Path(source.replace(IMAGE_FOLDER, str(other.folder)))
        if whole or path.exists():
            shutil.copy(path, folder)


def base_environment(python: Path) -> dict[str, str]:
    """The environment of a base image whose ``python3`` is this one: of this process only pip's settings."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    path = f"{python.parent}:/usr/local/bin:/usr/bin:/bin"
    return {**kept, "PATH": path, "HOME": str(python.parent.parent)}
