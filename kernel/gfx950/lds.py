"""The LDS of one workgroup: bytes, which of them are defined, and who touched them since the last barrier.

Tracking is done a granule at a time: 4 bytes where every LDS access of the kernel is whole aligned dwords,
else 1. An operation counts as happening anywhere between its issue and the wait that covers it, so what is
still in flight at a barrier is marked again behind it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import MissingWaitError, OutOfBoundsError, RaceError

Granules = npt.NDArray[np.int64]
_NO_WAVE = -1
POISON_BYTE = 0xAD


class Lds:
    """``size`` bytes. Waves are numbered from 0 to 31."""

    def __init__(self, size: int, granule: int) -> None:
        self.size = size
        self.granule = granule
        padded = -(-size // 16) * 16
        self.bytes: npt.NDArray[np.uint8] = np.full(padded, POISON_BYTE, np.uint8)
        self.words: npt.NDArray[np.uint32] = self.bytes.view(np.uint32)
        count = padded // granule
        self.defined: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.writer: npt.NDArray[np.int8] = np.full(count, _NO_WAVE, np.int8)
        self.readers: npt.NDArray[np.uint32] = np.zeros(count, np.uint32)
        self.dma: npt.NDArray[np.int16] = np.zeros(count, np.int16)
        self.dma_flights = 0

    def granules(self, addresses: npt.NDArray[np.int64], size: int) -> Granules:
        """Granules of ``size`` bytes at each address, ``[size / granule, lanes]``."""
        first = addresses // self.granule
        return first[None, :] + np.arange(-(-size // self.granule), dtype=np.int64)[:, None]

    def check_bounds(
        self, addresses: npt.NDArray[np.int64], size: int, align: int, lanes: npt.NDArray[np.intp]
    ) -> None:
        """``addresses`` are those of the active ``lanes``, bytes."""
        if (addresses & (align - 1)).any():
            at = int(np.argmax((addresses & (align - 1)) != 0))
            raise OutOfBoundsError(
                f"LDS address {int(addresses[at]):#x} is not a multiple of {align}", lane=int(lanes[at])
            )
        if int(addresses.min()) < 0 or int(addresses.max()) + size > self.size:
            at = int(np.argmax((addresses < 0) | (addresses + size > self.size)))
            raise OutOfBoundsError(
                f"{size} bytes at LDS address {int(addresses[at]):#x}: the workgroup has {self.size} bytes",
                lane=int(lanes[at]),
            )

    def mark_read(self, wave: int, granules: Granules) -> None:
        writer = self.writer[granules]
        if ((writer != _NO_WAVE) & (writer != wave)).any():
            self._race(wave, granules, (writer != _NO_WAVE) & (writer != wave), "reads", "wrote")
        self.readers[granules] |= np.uint32(1 << wave)
        if self.dma_flights:
            self._refuse_dma(granules)

    def mark_write(self, wave: int, granules: Granules) -> None:
        writer = self.writer[granules]
        if ((writer != _NO_WAVE) & (writer != wave)).any():
            self._race(wave, granules, (writer != _NO_WAVE) & (writer != wave), "writes", "wrote")
        others = self.readers[granules] & np.uint32(~(1 << wave) & 0xFFFFFFFF)
        if others.any():
            self._race(wave, granules, others != 0, "writes", "read")
        self.writer[granules] = wave
        if self.dma_flights:
            self._refuse_dma(granules)

    def mark_dma(self, wave: int, granules: Granules) -> None:
        """A DMA still in flight behind a barrier: who reads it needs its wait and one more barrier."""
        self.writer[granules] = wave

    def begin_dma(self, granules: Granules) -> None:
        self.dma[granules] += 1
        self.dma_flights += 1

    def end_dma(self, granules: Granules) -> None:
        self.dma[granules] -= 1
        self.dma_flights -= 1

    def barrier(self) -> None:
        """Forgets who touched what; the caller marks again what is still in flight."""
        self.writer.fill(_NO_WAVE)
        self.readers.fill(0)

    def _refuse_dma(self, granules: Granules) -> None:
        busy = self.dma[granules] != 0
        if busy.any():
            at = tuple(np.argwhere(busy)[0])
            raise MissingWaitError(
                f"LDS byte {int(granules[at]) * self.granule:#x} is touched while a DMA to it is in flight: "
                "no s_waitcnt vmcnt covers it"
            )

    def _race(self, wave: int, granules: Granules, bad: npt.NDArray[np.bool_], what: str, did: str) -> None:
        byte = int(granules[tuple(np.argwhere(bad)[0])])
        other = int(self.writer[byte])
        if did == "read":
            other = (int(self.readers[byte]) & ~(1 << wave)).bit_length() - 1
        raise RaceError(
            f"race on LDS byte {byte * self.granule:#x}: wave {wave} {what} what wave {other} {did} "
            "since the last barrier"
        )
