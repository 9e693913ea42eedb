"""Types of keys, each with an insert kernel of its own. Needs no FlyDSL."""

from __future__ import annotations

from enum import Enum

import torch


class KeyType(Enum):
    """Types that keys may have."""

    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"
    FLOAT32 = "fp32"

    @staticmethod
    def of(dtype: torch.dtype) -> KeyType:
        """The type of a tensor's values."""
        return {
            torch.bfloat16: KeyType.BFLOAT16,
            torch.float16: KeyType.FLOAT16,
            torch.float32: KeyType.FLOAT32,
        }[dtype]

    @property
    def num_bytes(self) -> int:
        """Of one value."""
        return 4 if self is KeyType.FLOAT32 else 2
