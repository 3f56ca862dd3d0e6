"""Invitations to a standalone coordinator: tokens that are each good for one key.

```
FOLDER/HASH.json    HASH: of the token, which is nowhere else
{"kind": "device", "expires_at": SECONDS, "name": "pi-4", "key": HEX}    name and key: once used
```

A token that was not used in time is good for nothing. One that was used is good for its key and
name for ever: with it a device renews its certificate, which lasts a day. Removing the record ends
that. Any process may add a record; one process alone reviews. What cannot be read, as after
damage to the disk, is no record: it is nobody's, and in nobody's way.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final

from shoal_protocol.durable_files import replace_file
from shoal_protocol.identities import USER, why_no_device
from shoal_protocol.pki.authority import Authority, Request
from shoal_protocol.pki.enrolment import (
    USED_WITH_ANOTHER_KEY,
    EnrolmentDenied,
    Grant,
    TokenRefused,
)

_TOKEN_BYTES: Final = 24
_FORGOTTEN: Final = timedelta(days=1)
"""How long after its end an unused invitation is still known to have been one."""


class Kind(StrEnum):
    """Who is invited."""

    DEVICE = "device"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A record. Once it was used: for which name, and the SHA-256 of the public key."""

    kind: Kind
    expires_at: float
    name: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Invitations:
    """The records in a folder."""

    folder: Path

    def add(self, kind: Kind, now: datetime, lifetime: timedelta) -> str:
        """A new token. Raises `OSError`."""
        self.folder.mkdir(exist_ok=True, mode=0o700)
        self._forget_expired(now)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        expires_at = (now + lifetime).timestamp()
        self._write(self._path(token), Invitation(kind=kind, expires_at=expires_at))
        return token

    def review(self, token: str, wanted: Request, authority: Authority, now: datetime) -> Grant:
        """What a token is good for; its first use is recorded. Raises `TokenRefused`,
        `EnrolmentDenied`, `OSError`."""
        path = self._path(token)
        known = _read(path)
        if known is None:
            raise TokenRefused("the token is not accepted: not of this coordinator, or forgotten")
        key = wanted.fingerprint.hex()
        if known.key:
            if known.key != key:
                raise EnrolmentDenied(USED_WITH_ANOTHER_KEY)
        elif now.timestamp() >= known.expires_at:
            raise TokenRefused("the token has expired; `shoal invite` makes another one")
        else:
            self._check_name(known.kind, wanted.name)
            known = replace(known, name=wanted.name, key=key)
            self._write(path, known)
        return Grant(name=known.name, holder=f"a {known.kind}", authority=authority)

    def devices(self) -> list[str]:
        """The names of the devices that have joined."""
        return sorted(record.name for _, record in self._joined())

    def forget(self, name: str) -> bool:
        """Have a device's certificate be its last; whether there is such a device."""
        found = [path for path, record in self._joined() if record.name == name]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def _check_name(self, kind: Kind, name: str) -> None:
        match kind:
            case Kind.CLIENT if name != USER:
                raise EnrolmentDenied("the token is a client's: use it with `shoal join`")
            case Kind.DEVICE if name == USER:
                raise EnrolmentDenied("the token is a device's: use it with `shoal agent`")
            case Kind.DEVICE:
                problem = why_no_device(name)
                if name in self.devices():
                    problem = (
                        "another device of this name has joined; give this one another with --name,"
                        f" or make room with `shoal forget {name}` on the coordinator's machine"
                    )
                if problem is not None:
                    raise EnrolmentDenied(f"{name} cannot be a device: {problem}")

    def _joined(self) -> Iterator[tuple[Path, Invitation]]:
        """Of the devices that have; all clients have one name, and what nobody used has none."""
        return (
            (path, record)
            for path, record in self._records()
            if record.kind is Kind.DEVICE and record.key
        )

    def _records(self) -> Iterator[tuple[Path, Invitation]]:
        for path in sorted(self.folder.glob("*.json")):
            if (record := _read(path)) is not None:
                yield path, record

    def _forget_expired(self, now: datetime) -> None:
        for path, record in self._records():
            if not record.key and record.expires_at < (now - _FORGOTTEN).timestamp():
                path.unlink(missing_ok=True)

    def _path(self, token: str) -> Path:
        return self.folder / f"{hashlib.sha256(token.encode()).hexdigest()}.json"

    def _write(self, path: Path, record: Invitation) -> None:
        replace_file(path, json.dumps(asdict(record)).encode())


def _read(path: Path) -> Invitation | None:
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        values = json.loads(path.read_bytes())
        return Invitation(**{**values, "kind": Kind(values["kind"])})
    return None
