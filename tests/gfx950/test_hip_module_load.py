"""A module that fails to load: FlyDSL never tries again, so it is tried in a process of its own."""

from __future__ import annotations

import json
from typing import Any

from tests.support.process import printed_by

PROGRAM = """
import json, sys
import torch
from kernel.errors import LaunchError
from kernel.gfx950.hip import simulated_device
from tests.gfx950.scaled_add import prepare, scaled_add

device = simulated_device()
prepare(device)
x, out = torch.ones(4), torch.zeros(4)
before = device.calls()
messages = []
try:
    with device.failing("hipModuleLoadData", 209):
        scaled_add(device, x, x, out, 1.0)
except LaunchError as error:
    messages.append(str(error))
made = sorted(set(device.calls()) - set(before))
try:
    scaled_add(device, x, x, out, 1.0)
except LaunchError as error:
    messages.append(str(error))
print(json.dumps({"messages": messages, "calls": made, "out": out.tolist()}))
"""

CALLS = """
import json
import torch
from kernel.gfx950.hip import simulated_device
from tests.gfx950.scaled_add import prepare, scaled_add

device = simulated_device()
prepare(device)
x, out = torch.ones(4), torch.zeros(4)
scaled_add(device, x, x, out, 1.0)
first = device.calls()
scaled_add(device, x, x, out, 1.0)
second = {call: count - first.get(call, 0) for call, count in device.calls().items()}
print(json.dumps({"first": sorted(first), "second": sorted(call for call, count in second.items() if count)}))
"""


def run(program: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(printed_by("-c", program).splitlines()[-1])
    return result


def test_a_module_that_fails_to_load_is_an_error_now_and_later() -> None:
    result = run(PROGRAM)
    first, later = result["messages"]
    assert "hipModuleLoadData returned hipErrorNoBinaryForGpu (209)" in first
    assert "restart the process" in later
    assert result["out"] == [0.0] * 4


def test_the_calls_of_a_launch_are_those_whose_failure_is_tested() -> None:
    """If FlyDSL begins to make another call, its failure is to be tried as well."""
    result = run(CALLS)
    assert result["first"] == ["hipModuleGetFunction", "hipModuleLaunchKernel", "hipModuleLoadData"]
    assert result["second"] == ["hipModuleGetFunction", "hipModuleLaunchKernel"]
