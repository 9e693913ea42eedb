"""Which host memory a launch may touch: the elements of its tensors, nothing beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allocation:
    """``size`` bytes at ``address``."""

    address: int
    size: int
    name: str

    @property
    def end(self) -> int:
        return self.address + self.size


def extents(tensors: Iterable[torch.Tensor]) -> list[Allocation]:
    """From the first to the last element of each tensor; tensors that overlap are one allocation.

    Raises:
        ValueError: a tensor is not on the CPU.
    """
    found: list[Allocation] = []
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"tensors[{position}].device = {tensor.device}: the simulated device's memory is the CPU's"
            )
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            size = (last + 1) * tensor.element_size()
            name = f"tensor {position} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            found.append(Allocation(tensor.data_ptr(), size, name))
    return merged(found)


def merged(allocations: Iterable[Allocation]) -> list[Allocation]:
    """The same bytes as allocations that do not overlap, in order of address."""
    result: list[Allocation] = []
    for allocation in sorted(allocations, key=lambda a: a.address):
        if result and allocation.address < result[-1].end:
            last = result.pop()
            end = max(last.end, allocation.end)
            allocation = Allocation(last.address, end - last.address, f"{last.name} and {allocation.name}")
        result.append(allocation)
    return result
