"""Launching the insert kernels."""

from __future__ import annotations

import torch

from kernel.backends.flydsl import kernel_names
from kernel.backends.flydsl.compiled import Launch, kernels_on
from kernel.backends.flydsl.insert_geometry import KEYS_PER_WORKGROUP, LOAD_BYTES
from kernel.backends.flydsl.key_type import KeyType
from kernel.backends.flydsl.runtime import Device
from kernel.contract import BLOCK_TOKENS

_MAX_LAUNCH_KEYS = 1 << 27
"""A grid may hold 2^32 threads, eight a key, so launches are chunked."""


class InsertLauncher:
    """Inserts keys on one device; see :class:`kernel.backends.flydsl.launch.PrefillLauncher`."""

    def __init__(self, device: Device) -> None:
        self._kernels = kernels_on(device, kernel_names.insert, _build)

    def __call__(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise and scatter; asynchronous on a GPU. See :meth:`kernel.backends.base.Backend.insert`.

        A slot past the pages is skipped like a negative one: to refuse it, its value would have to be waited
        for.

        Raises:
            LaunchError: a HIP call failed; what the slots hold is undefined.
        """
        if not keys.shape[0] or not pages.shape[0]:
            return
        key_bytes = keys.element_size()
        alignment = LOAD_BYTES
        if keys.stride(1) != 1 or keys.stride(0) * key_bytes % alignment or keys.data_ptr() % alignment:
            keys = keys.clone(memory_format=torch.contiguous_format)
        slots = slots.contiguous()
        key_stride = keys.stride(0) * key_bytes
        for first in range(0, keys.shape[0], _MAX_LAUNCH_KEYS):
            num = min(keys.shape[0] - first, _MAX_LAUNCH_KEYS)
            arguments = (
                keys.data_ptr() + first * key_stride,
                key_stride,
                slots.data_ptr() + 8 * first,
                pages.data_ptr(),
                pages.stride(0),
                pages.shape[0] * BLOCK_TOKENS,
                num,
                -(-num // KEYS_PER_WORKGROUP),
            )
            self._kernels.launch(KeyType.of(keys.dtype), [keys, pages, slots], *arguments)


def _build(key_type: KeyType) -> Launch:
    from kernel.backends.flydsl import insert

    return insert.build(key_type)
