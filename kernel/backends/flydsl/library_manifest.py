"""What a kernel library says of itself, behind its last byte, where a loader looks at nothing.

    ELF image | manifest, JSON | SHA-256 of both | length of the manifest, 8 bytes, little endian | MAGIC

So that a library that is cut, garbled or made from other kernels is refused before any of its code is mapped.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kernel import contract, plan
from kernel.backends.flydsl import kernel_names
from kernel.backends.flydsl.runtime import TARGET

MAGIC = b"nvfp4-indexer-kernels-2\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_FIELDS = {"target": str, "sources": str, "kernels": dict, "partial": bool}


class ManifestError(ValueError):
    """A file is no kernel library of this program; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """What is in a library.

    Attributes:
        target: architecture of the kernels.
        sources: digest of the sources that they, and the order of their arguments, come from.
        kernels: number of launch arguments, the stream among them, by the kernel's symbol.
        partial: it was exported with some of the kernels only.
        digest: of the ELF image and of all that the manifest says.
    """

    target: str
    sources: str
    kernels: dict[str, int]
    partial: bool
    digest: str


def sealed(image: bytes, kernels: dict[str, int], *, partial: bool) -> bytes:
    """A library of this program's kernels: the linked image, its manifest behind it."""
    fields = {"target": TARGET, "sources": sources_digest(), "kernels": kernels, "partial": partial}
    text = json.dumps(fields, sort_keys=True).encode()
    digest = hashlib.sha256(image + text).digest()
    return image + text + digest + len(text).to_bytes(_LENGTH_BYTES, "little") + MAGIC


def read(path: Path) -> Manifest:
    """The manifest of a library that fits this program.

    Raises:
        ManifestError: it does not fit.
        OSError: it cannot be read.
    """
    text, image, digest = _split(path.read_bytes())
    if digest != hashlib.sha256(image + text).digest():
        raise ManifestError("its bytes are not those that were linked")
    manifest = _parsed(text, digest.hex())
    if manifest.target != TARGET:
        raise ManifestError(f"its kernels are for {manifest.target}, not {TARGET}")
    if manifest.sources != sources_digest():
        raise ManifestError("it was made from other kernel sources than this version's")
    missing = [name for name in kernel_names.every() if name not in manifest.kernels]
    if missing and not manifest.partial:
        raise ManifestError(f"it holds no {', '.join(missing)}")
    return manifest


def _split(whole: bytes) -> tuple[bytes, bytes, bytes]:
    end = len(whole) - len(MAGIC) - _LENGTH_BYTES
    if end < 0 or not whole.endswith(MAGIC):
        raise ManifestError("it does not end with a manifest")
    seal = end - _DIGEST_BYTES
    start = seal - int.from_bytes(whole[end : end + _LENGTH_BYTES], "little")
    if start < 0:
        raise ManifestError("its manifest is garbled")
    return whole[start:seal], whole[:start], whole[seal:end]


def _parsed(text: bytes, digest: str) -> Manifest:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ManifestError("its manifest is garbled") from error
    if not isinstance(fields, dict) or fields.keys() != _FIELDS.keys():
        raise ManifestError("its manifest is garbled: it has other fields")
    for name, kind in _FIELDS.items():
        if type(fields[name]) is not kind:
            raise ManifestError(f"its manifest is garbled: {name} is no {kind.__name__}")
    for name, count in fields["kernels"].items():
        if type(count) is not int or count < 1:  # a bool is an int to isinstance
            raise ManifestError(f"its manifest is garbled: {name} takes {count!r} arguments")
    return Manifest(**fields, digest=digest)


@functools.cache
def sources_digest() -> str:
    """Digest of every source that a kernel or its launch is made from."""
    paths = [*Path(__file__).parent.glob("*.py"), Path(contract.__file__), Path(plan.__file__)]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda one: one.name):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
