"""Digests: the SHA-256 of bytes, by which fragments, models and files are named and verified.

One form everywhere in the program: `sha256:` and 64 lower-case hexadecimal digits. Folder names,
`fragment.json` and the messages of `Files` hold the hexadecimal digits alone.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import BinaryIO, Final, NewType

from shoal_protocol.page_cache import cache_in_small_pages

Digest = NewType("Digest", str)
"""`sha256:` and 64 hexadecimal digits."""

_PREFIX: Final = "sha256:"
_HEXADECIMAL: Final = re.compile(r"[0-9a-f]{64}")
_READ_BYTES: Final = 256 << 10


def is_hexadecimal(text: str) -> bool:
    """Whether a text is 64 lower-case hexadecimal digits."""
    return _HEXADECIMAL.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Whether a text is a digest; only such a text may become part of a path."""
    return text.startswith(_PREFIX) and is_hexadecimal(text.removeprefix(_PREFIX))


def from_hexadecimal(text: str) -> Digest:
    """The digest with these digits. Raises `ValueError`."""
    if not is_hexadecimal(text):
        raise ValueError(f"{text[:80]!r} is not 64 hexadecimal digits")
    return Digest(_PREFIX + text)


def hexadecimal(digest: str) -> str:
    """The 64 digits of a digest: the name of its folder. Raises `ValueError`."""
    if not is_digest(digest):
        raise ValueError(f"{digest[:80]!r} is no digest")
    return digest.removeprefix(_PREFIX)


def digest_of(content: bytes) -> Digest:
    """The digest of bytes that are in memory."""
    return digest_of_pieces([content])


def digest_of_pieces(pieces: Iterable[bytes | memoryview]) -> Digest:
    """The digest of bytes that come in pieces; each is used before the next is asked for."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return Digest(_PREFIX + found.hexdigest())


def digest_of_file(file: BinaryIO) -> Digest:
    """The digest of an open file, from its position to its end. Raises `OSError`."""
    return digest_of_pieces(iter(lambda: file.read(_READ_BYTES), b""))


def digest_of_mapped(file: BinaryIO) -> Digest:
    """The same of a file that devices map. Raises `OSError`."""
    cache_in_small_pages(file)
    return digest_of_file(file)


def digest_of_model(model: Digest, external: Mapping[str, Digest]) -> Digest:
    """The digest of an ONNX model: its file's own, or where it has files of external data, that of
    the list of all files. `external` gives the digests of those files by their names."""
    if not external:
        return model
    lines = [(model, "model.onnx"), *((each, name) for name, each in sorted(external.items()))]
    return digest_of_pieces(f"{hexadecimal(each)}  {name}\n".encode() for each, name in lines)
