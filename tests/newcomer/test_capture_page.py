"""The blocks of docs/capture.md: the torch loop runs as it stands, the engines' calls fit the signature."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from indexer import Recorder
from indexer.case import read_case
from tests.support.command import call
from tests.support.real_cases import ROOT

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/capture.md").read_text(), re.MULTILINE | re.DOTALL
)
CALLS = [
    node
    for block in BLOCKS
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("recorder.capture")
]
(LOOP,) = (block for block in BLOCKS if "append_keys" in block)


def test_the_torch_loop_writes_a_capture_that_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no folder "out" is
    exec(compile(LOOP, "docs/capture.md", "exec"), {})  # noqa: S102 - the point of the test
    (path,) = tmp_path.rglob("*.safetensors")
    case = read_case(path)
    assert case.engine is not None
    assert case.engine.block_ids is not None
    result = call("verify", path, "--backend", "cpu")
    assert result.exit_code == 0, result.stdout
    assert "engine" in result.stdout


def test_engines_call_it_as_it_can_be_called() -> None:
    assert len(CALLS) == 3, "the sketch, vLLM, SGLang"
    signature = inspect.signature(Recorder.capture)
    for node in CALLS:
        keywords = {str(word.arg): None for word in node.keywords}
        signature.bind(None, *node.args, **keywords)
