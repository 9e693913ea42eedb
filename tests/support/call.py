"""A scoring call as an engine makes it, kept on the host until a backend needs it on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernel.backends.reference.quantizer import magnitude_lut
from kernel.batch import ScoreBatch
from kernel.checks import checked_batch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`kernel.checks.checked_batch`, on the host."""

    q: torch.Tensor
    """``[total_q, H, 128]`` float8_e4m3fn."""
    pages: torch.Tensor
    """``[num_pages, 9216]`` uint8, any page stride."""
    block_table: torch.Tensor
    """``[batch, max_blocks]`` int32."""
    cu_seqlens_q: torch.Tensor
    """``[batch + 1]`` int32."""
    seq_lens: torch.Tensor
    """``[batch]`` int32."""
    init_blocks: int = 0
    local_blocks: int = 0

    @property
    def total_q(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    def forcing(self, init_blocks: int, local_blocks: int) -> Call:
        """The same call with other forced blocks."""
        return replace(self, init_blocks=init_blocks, local_blocks=local_blocks)

    def batch(self, device: torch.device = CPU) -> ScoreBatch:
        """The checked call on a device; on the CPU it shares memory with this one."""
        return checked_batch(
            self.q.to(device),
            pages_on(self.pages, device),
            self.block_table.to(device),
            self.cu_seqlens_q.to(device),
            self.seq_lens.to(device),
            lut=torch.from_numpy(magnitude_lut()).to(device),
            num_heads=self.num_heads,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
        )


def pages_on(pages: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pages on a device with the stride they have; themselves where they are there already."""
    if pages.device == device:
        return pages
    copy = torch.empty_strided(pages.shape, pages.stride(), dtype=pages.dtype, device=device)
    return copy.copy_(pages)


def cumulative(lengths: list[int]) -> torch.Tensor:
    """Exclusive prefix sums as int32, ``[len + 1]``."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
