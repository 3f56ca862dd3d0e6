"""Addresses in manifests, as local mode understands them: a path on this machine."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from shoal_cli.transfer.places import redacted

_CLAIM: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


class AddressRefused(Exception):
    """An address that local mode cannot follow: which, and what to do about it."""

    def __init__(self, address: str, reason: str) -> None:
        address = redacted(address)
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason


def resolve_uri(uri: str, base: Path, volumes: Mapping[str, Path]) -> Path:
    """The absolute path that an address names; it need not exist.

    `pvc://CLAIM/PATH` lies in the folder `volumes[CLAIM]`, by default `CLAIM` in `base`, and may
    not leave it, neither by `..` nor by a symbolic link. `file:///PATH` is absolute. Anything
    without a scheme is a path, relative to `base`. `AddressRefused` for the rest.
    """
    if "\0" in uri:
        raise AddressRefused(repr(uri), "has a zero byte")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return (base / uri).absolute()
    match scheme:
        case "pvc":
            return _in_claim(uri, rest, base, volumes)
        case "file":
            return _of_file(uri)
        case _:
            raise AddressRefused(uri, f"{scheme}:// names no file of this machine")


def _of_file(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise AddressRefused(uri, "write file:///ABSOLUTE/PATH, or a path without file://")
    return Path(unquote(parts.path))


def _in_claim(uri: str, rest: str, base: Path, volumes: Mapping[str, Path]) -> Path:
    claim, _, inner = rest.partition("/")
    if not _CLAIM.fullmatch(claim):
        raise AddressRefused(uri, "write pvc://CLAIM/PATH")
    if inner.startswith("/") or ".." in inner.split("/"):
        raise AddressRefused(uri, f"leaves the claim {claim}")
    root = volumes.get(claim, base / claim).absolute()
    path = root / inner
    # Where a link inside of the claim points elsewhere, the claim's files are not what is read.
    if not path.resolve().is_relative_to(root.resolve()):
        raise AddressRefused(uri, f"a link leads out of the claim {claim} ({root})")
    return path
