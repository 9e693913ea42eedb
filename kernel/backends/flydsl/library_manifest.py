"""What a kernel library says of itself, behind its last byte, where a loader looks at nothing.

    ELF image | manifest, JSON | length of the manifest, 8 bytes, little endian | MAGIC

So that a library that is cut, garbled or made from other kernels is refused before any of its code is mapped.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kernel import contract, plan
from kernel.backends.flydsl.runtime import TARGET

MAGIC = b"nvfp4-indexer-kernels-1\n"
_LENGTH_BYTES = 8


class ManifestError(ValueError):
    """A file is no kernel library of this program; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """What is in a library.

    Attributes:
        target: architecture of the kernels.
        sources: digest of the sources that they, and the order of their arguments, come from.
        image: digest of the ELF image.
        kernels: number of launch arguments, the stream among them, by the kernel's symbol.
    """

    target: str
    sources: str
    image: str
    kernels: dict[str, int]


def sealed(image: bytes, kernels: dict[str, int]) -> bytes:
    """A library of this program's kernels: the linked image, its manifest behind it."""
    manifest = Manifest(TARGET, sources_digest(), hashlib.sha256(image).hexdigest(), kernels)
    text = json.dumps(asdict(manifest), sort_keys=True).encode()
    return image + text + len(text).to_bytes(_LENGTH_BYTES, "little") + MAGIC


def read(path: Path) -> Manifest:
    """The manifest of a library that fits this program.

    Raises:
        ManifestError: it does not fit.
        OSError: it cannot be read.
    """
    whole = path.read_bytes()
    text, image = _split(whole)
    try:
        manifest = Manifest(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ManifestError("its manifest is garbled") from error
    if manifest.target != TARGET:
        raise ManifestError(f"its kernels are for {manifest.target}, not {TARGET}")
    if manifest.sources != sources_digest():
        raise ManifestError("it was made from other kernel sources than this version's")
    if manifest.image != hashlib.sha256(image).hexdigest():
        raise ManifestError("its bytes are not those that were linked")
    return manifest


def _split(whole: bytes) -> tuple[bytes, bytes]:
    end = len(whole) - len(MAGIC) - _LENGTH_BYTES
    if end < 0 or not whole.endswith(MAGIC):
        raise ManifestError("it does not end with a manifest")
    start = end - int.from_bytes(whole[end : end + _LENGTH_BYTES], "little")
    if start < 0:
        raise ManifestError("its manifest is garbled")
    return whole[start:end], whole[:start]


@functools.cache
def sources_digest() -> str:
    """Digest of every source that a kernel or its launch is made from."""
    paths = [*Path(__file__).parent.glob("*.py"), Path(contract.__file__), Path(plan.__file__)]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda one: one.name):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
