"""A capture of 2 GB is replayed within 4 GB of memory, and its one fault is found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cases import ROOT

REQUESTS = 28
CONTEXT = 1 << 20
WRONG_ROW = (2, 17)
"""Head and request whose ids are not what the pages give."""

MAKE = f"""
import sys
import numpy as np
import torch
from indexer import capture

blocks, requests = {CONTEXT} // 128, {REQUESTS}
random = np.random.default_rng(0)
pages = torch.from_numpy(random.integers(0, 256, (blocks * requests, 9216), dtype=np.uint8))
pages[:, 8192:] &= 7  # scales of 2^-9 to 2^-6: noise
table = torch.from_numpy(random.permutation(blocks * requests).astype(np.int32)).view(requests, blocks)
queries = torch.from_numpy(np.abs(random.standard_normal((requests, 4, 128), dtype=np.float32)))
ids = torch.empty(4, requests, 16, dtype=torch.int32)
for request in range(requests):
    bright = np.sort(random.permutation(blocks - 1)[:15])  # positive keys of scale 1, for positive queries
    places = table[request, bright].long()
    pages[places, :8192] = 0x22
    pages[places, 8192:] = 0x38
    ids[:, request] = torch.tensor([*bright.tolist(), blocks - 1])  # and the local block
ids[{WRONG_ROW}] = torch.arange(16, dtype=torch.int32) * 500
starts = torch.arange(requests + 1, dtype=torch.int32)
lens = torch.full((requests,), {CONTEXT}, dtype=torch.int32)
capture(sys.argv[1], queries, pages, table, starts, lens, block_ids=ids, max_bytes=1 << 32)
"""
VERIFY = """
import resource, sys
from client.cli import app
try:
    app(["verify", sys.argv[1], "--backend", "cpu", "--json"])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_two_gigabytes_are_replayed_within_four(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    subprocess.run([sys.executable, "-c", MAKE, str(path)], cwd=ROOT, check=True)
    assert path.stat().st_size > 2e9
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    path.unlink()
    assert done.returncode == 1, done.stderr
    most = 1024 * int(done.stderr.split()[-1])
    print(f"replayed in {time.perf_counter() - began:.0f} s, at most {most / 1e9:.2f} GB resident")
    assert most < 4e9
    line = json.loads(done.stdout)
    assert line["topk_mismatches"] == 0
    engine = line["engine"]
    assert engine["fault_rows"] == 1
    assert {(f["head"], f["request"]) for f in engine["findings"]} == {WRONG_ROW}
