"""What a standalone coordinator keeps on disk.

```
FOLDER/authority/certificate.pem, key.pem           signs for devices, users and the coordinator
       enrolment/certificate.pem, key.pem           of the enrolment service; join lines name it
       coordinator/current/ca.pem, certificate.pem, key.pem     renewed; `current` is a link
       invitations/HASH.json                        see `invitations`
       store/, logs/                                the coordinator's own
       lock                                         held by the process that serves
```

Whoever reads the folder can be everybody: it is its user's alone.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from shoal_cli.standalone.invitations import Invitations
from shoal_protocol.channels import Credentials
from shoal_protocol.durable_files import replace_file
from shoal_protocol.identities import COORDINATOR, ENROLMENT
from shoal_protocol.join_lines import JoinLine
from shoal_protocol.pki.authority import (
    Authority,
    CertificateRefused,
    Issued,
    Use,
    fingerprint_of,
    is_fresh,
    is_issued_by,
    renewal_time,
    self_signed,
)
from shoal_protocol.pki.request import Refused, check_clock, make_current
from shoal_protocol.state_folders import state_folder

_EARLIEST: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""No clock is right that says less: this program is younger."""


class FolderInUse(Exception):
    """Another coordinator has the folder."""


class AuthorityUnusable(Exception):
    """What is in the folder is no authority, or has ended."""


class FolderMissing(Exception):
    """No coordinator has ever run with this folder."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder at `root`."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def invitations(self) -> Invitations:
        return Invitations(self.root / "invitations")

    @property
    def credentials(self) -> Credentials:
        """The coordinator's."""
        return Credentials.of_folder(self.root / "coordinator" / "current")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Have the folder for this process alone; it is made. Raises `FolderInUse`, `OSError`."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)
        with (self.root / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUse(
                    f"{self.root} is used by another coordinator; stop that one, or give this one "
                    "a folder of its own with --folder DIR"
                ) from None
            yield

    def authority(self, now: datetime) -> Authority:
        """The authority, made if there is none yet. Raises `AuthorityUnusable`, `OSError`."""
        if now < _EARLIEST:
            raise AuthorityUnusable(
                f"the clock of this machine says {now:%Y-%m-%d}: set it first, since devices "
                "believe no certificate of another time"
            )
        pair = self._pair("authority", lambda: _as_issued(Authority.make("shoal", now)))
        try:
            authority = Authority.load(pair.certificate, pair.key)
            check_clock(pair.certificate, "it", now)
        except CertificateRefused as error:
            raise AuthorityUnusable(f"{self.root / 'authority'}: {error}") from error
        except Refused as error:
            raise AuthorityUnusable(
                f"{self.root / 'authority'}: {error}; where the clock is right, and was wrong when "
                f"it was made, delete {self.root / 'authority'} and {self.root / 'enrolment'}, and "
                "have all join again"
            ) from error
        return authority

    def enrolment(self, now: datetime) -> Issued:
        """The certificate of the enrolment service, made if there is none yet."""
        return self._pair("enrolment", lambda: self_signed(ENROLMENT, now))

    def renew(self, authority: Authority, now: datetime) -> datetime:
        """Have a coordinator's certificate that is good for a while; when that is to be renewed.
        Raises `OSError`."""
        with contextlib.suppress(OSError, ValueError):
            known = self.credentials.certificate.read_bytes()
            if is_fresh(known, now) and is_issued_by(known, authority.certificate):
                return renewal_time(known)
        issued = authority.issue(COORDINATOR, now, use=Use.BOTH)
        place = self.root / "coordinator"
        pending = place / "pending"
        pending.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_private(pending / "key.pem", issued.key)
        _write_private(pending / "certificate.pem", issued.certificate)
        _write_private(pending / "ca.pem", authority.certificate)
        make_current(place, pending, now.strftime("%Y%m%dT%H%M%S%f"))
        return renewal_time(issued.certificate)

    def note_address(self, host: str, port: int) -> None:
        """Remember where the coordinator is reached, for join lines of later."""
        replace_file(self.root / "address.json", json.dumps([host, port]).encode())

    def check_used(self) -> None:
        """Raise `FolderMissing` where no coordinator has run."""
        if not (self.root / "address.json").exists():
            raise FolderMissing(
                f"no coordinator has run with {self.root}; start `shoal coordinator` first, or "
                "name its folder with --folder DIR"
            )

    def line(self, token: str) -> JoinLine:
        """A join line. Raises `OSError`."""
        host, port = json.loads((self.root / "address.json").read_bytes())
        shown = (self.root / "enrolment" / "certificate.pem").read_bytes()
        return JoinLine(host=host, port=port, fingerprint=fingerprint_of(shown), token=token)

    def _pair(self, name: str, make: Callable[[], Issued]) -> Issued:
        """A certificate and its key; the certificate is written last, so that it has one."""
        folder = self.root / name
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        if not certificate.exists():
            folder.mkdir(exist_ok=True, mode=0o700)
            made = make()
            _write_private(key, made.key)
            _write_private(certificate, made.certificate)
        return Issued(certificate=certificate.read_bytes(), key=key.read_bytes())


def default_folder() -> Path:
    """Of this user's coordinator."""
    return state_folder() / "coordinator"


def _as_issued(authority: Authority) -> Issued:
    return Issued(certificate=authority.certificate, key=authority.key)


def _write_private(path: Path, content: bytes) -> None:
    """The folder is this user's alone; so is the file, if it is ever copied with its mode."""
    replace_file(path, content)
    os.chmod(path, 0o600)
