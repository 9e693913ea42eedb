"""The part of MessagePack that code objects use for their metadata."""

from __future__ import annotations

from typing import TypeAlias

Value: TypeAlias = "bool | int | str | list[Value] | dict[str, Value] | None"

_CONSTANTS: dict[int, bool | None] = {0xC0: None, 0xC2: False, 0xC3: True}


def decode(encoded: bytes) -> Value:
    """The first value of ``encoded``; bytes after it are padding.

    Raises:
        ValueError: it ends early, or holds a type that metadata does not use (floats, binary, extensions).
    """
    return _Reader(encoded).value()


class _Reader:
    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self._at = 0

    def _take(self, size: int) -> bytes:
        taken = self._encoded[self._at : self._at + size]
        if len(taken) < size:
            raise ValueError(
                f"MessagePack ends at byte {len(self._encoded)}, {size} more are due at {self._at}"
            )
        self._at += size
        return taken

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "big", signed=signed)

    def _text(self, size: int) -> str:
        return self._take(size).decode()

    def _array(self, size: int) -> Value:
        return [self.value() for _ in range(size)]

    def _map(self, size: int) -> Value:
        return {self._key(): self.value() for _ in range(size)}

    def _key(self) -> str:
        key = self.value()
        if not isinstance(key, str):
            raise ValueError(  # noqa: TRY004  it is the file that is wrong, not an argument
                f"MessagePack map key of type {type(key).__name__} at byte {self._at}"
            )
        return key

    def value(self) -> Value:
        tag = self._take(1)[0]
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self._map(tag & 0x0F)
        if tag < 0xA0:
            return self._array(tag & 0x0F)
        if tag < 0xC0:
            return self._text(tag & 0x1F)
        if tag >= 0xE0:
            return tag - 0x100
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if 0xCC <= tag <= 0xCF:
            return self._number(1 << (tag - 0xCC))
        if 0xD0 <= tag <= 0xD3:
            return self._number(1 << (tag - 0xD0), signed=True)
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._number(1 << (tag - 0xD9)))
        if tag in (0xDC, 0xDD):
            return self._array(self._number(2 << (tag - 0xDC)))
        if tag in (0xDE, 0xDF):
            return self._map(self._number(2 << (tag - 0xDE)))
        raise ValueError(f"MessagePack type {tag:#x} at byte {self._at - 1}")
