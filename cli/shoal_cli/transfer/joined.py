"""The standalone coordinators that this user has joined, and who the user is to each.

```
STATE/coordinators/HOST:PORT/join       the line that it was joined with, for this user alone
                             current/   certificate, key and authority; renewed when two thirds of
                                        the certificate's life have passed
                             failed     written when a renewal failed
```

A token that was used is good for the same key only, and with that it renews the certificate.
"""

import asyncio
import contextlib
import fcntl
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

import grpc

from shoal_protocol.certificate_times import with_clock
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.coordinator_client import CallFailed, CoordinatorClient
from shoal_protocol.durable_files import replace_file
from shoal_protocol.identities import COORDINATOR, USER
from shoal_protocol.join_lines import JoinLine, parse_join_line
from shoal_protocol.state_folders import state_folder

_FAILED: Final = "failed"
_TOO_LATE: Final = "Deadline Exceeded"
"""gRPC's own words where no answer came; a coordinator has others."""
_RETRIES: Final = 50
"""A renewal that failed is tried again so often while the certificate is valid: where nothing comes
back from the coordinator's address, each costs a minute, and all commands of the user wait."""


class NotJoined(Exception):
    """A coordinator that this user has no certificate for; the text says how to get one."""


class JoinRefused(Exception):
    """The coordinator, or what is at its address, gives no certificate: the text says why."""


class CallRefused(Exception):
    """The coordinator refuses what it was asked; the text says why."""


class CoordinatorAway(Exception):
    """Nobody answers at the coordinator's address; another time somebody may."""


@dataclass(frozen=True, slots=True)
class Reachable:
    """A coordinator and who we are to it; without credentials behind a Unix socket. `line` is what
    renews them: a job may take longer than they last."""

    target: str
    credentials: Credentials | None = None
    line: JoinLine | None = None

    def renew(self) -> None:
        """Have another certificate where that is due; what connects after that shows it. Raises
        `JoinRefused`, `CoordinatorAway`, `OSError`."""
        if self.line is not None:
            folder = _folder(self.target)
            with _alone(folder):
                _renew(self.line, folder)

    def channel(self) -> grpc.aio.Channel:
        """A channel to it. Raises `channels.AddressRefused`, `OSError`."""
        name = None if self.credentials is None else COORDINATOR
        return open_channel(self.target, self.credentials, server_name=name)

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[CoordinatorClient]:
        """A client of it. Raises as `renew` and `channel` do; and `CoordinatorAway` or
        `CallRefused` for a call that fails."""
        await asyncio.to_thread(self.renew)
        client = CoordinatorClient(self.channel())
        try:
            with explained(self.target):
                yield client
        finally:
            await client.close()


@contextlib.contextmanager
def explained(coordinator: str) -> Iterator[None]:
    """Have a call that fails raise `CoordinatorAway` or `CallRefused`, which names it."""
    try:
        yield
    except CallFailed as error:
        kind = CoordinatorAway if error.unreachable else CallRefused
        raise kind(_in_words(coordinator, error)) from error


def _in_words(coordinator: str, error: CallFailed) -> str:
    if error.reason == _TOO_LATE:
        return (
            f"{coordinator} does not answer in time: its machine may be suspended or very busy, or "
            "the network between is down or slow"
        )
    return with_clock(f"{coordinator}: {error}", time.time())


def join(line: JoinLine) -> None:
    """Get a certificate with a join line, and remember the coordinator. Raises `JoinRefused`,
    `CoordinatorAway`, `OSError`."""
    folder = _folder(line.target)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(folder):
        _enrol(line, folder)
        replace_file(folder / "join", str(line).encode())


def joined() -> list[str]:
    """The targets of the coordinators that were joined."""
    return sorted(path.parent.name for path in _folder("").glob("*/join"))


def reach(target: str | None) -> Reachable:
    """The coordinator at a target, by default the only one that was joined; the certificate is
    renewed if that is due. Raises `NotJoined`, `JoinRefused`, `CoordinatorAway`, `OSError`."""
    if target is None:
        target = _only_one(joined())
    if target.startswith("unix:"):
        return Reachable(target)
    folder = _folder(target)
    try:
        line = parse_join_line((folder / "join").read_text())
    except (FileNotFoundError, ValueError) as error:
        known = ", ".join(joined())
        raise NotJoined(
            f"{target} was not joined by this user{f' (but {known})' if known else ''}; "
            "`shoal invite --client` on the coordinator's machine prints a line for `shoal join`"
        ) from error
    found = Reachable(target, Credentials.of_folder(folder / "current"), line)
    found.renew()
    return found


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time changes a certificate."""
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _only_one(known: list[str]) -> str:
    match known:
        case [target]:
            return target
        case []:
            raise NotJoined(
                "no coordinator was joined by this user; `shoal invite --client` on a "
                "coordinator's machine prints a line for `shoal join`"
            )
        case _:
            raise NotJoined(
                f"several coordinators were joined: {', '.join(known)}; "
                "name one with --coordinator HOST:PORT"
            )


def _folder(target: str) -> Path:
    return state_folder() / "coordinators" / target


def _renew(line: JoinLine, folder: Path) -> None:
    """Another certificate when it is time; as long as the old one is valid, it need not succeed."""
    try:
        identity = json.loads((folder / "current" / "identity.json").read_bytes())
        renew_at, expires_at = float(identity["renew_at"]), float(identity["expires_at"])
        starts_at = float(identity.get("starts_at", 0.0))  # earlier versions do not say it
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        starts_at, renew_at, expires_at = 0.0, 0.0, 0.0
    pause = (expires_at - renew_at) / _RETRIES
    # One of the future was made by a clock that was ahead, and may be of no use when that is set.
    fresh = starts_at <= time.time() < renew_at
    if fresh or (time.time() < expires_at and _since_failed(folder) < pause):
        return
    try:
        _enrol(line, folder)
    except (CoordinatorAway, JoinRefused, OSError):  # a disk may be full
        if time.time() >= expires_at:
            raise
        with contextlib.suppress(OSError):
            (folder / _FAILED).touch()


def _since_failed(folder: Path) -> float:
    """Seconds since a renewal failed."""
    try:
        return abs(time.time() - (folder / _FAILED).stat().st_mtime)
    except OSError:
        return inf


def _enrol(line: JoinLine, folder: Path) -> None:
    # What makes keys is heavy: a valid identity needs none of it, and a worker pod has none of it.
    from shoal_protocol.pki import request  # noqa: PLC0415

    order = request.Order(
        target=line.enrolment_target,
        token=line.token,
        name=USER,
        folder=str(folder),
        fingerprint=line.fingerprint,
    )
    try:
        request.enrol(order)
    except request.Refused as error:
        raise JoinRefused(str(error)) from error
    except request.NoAnswer as error:
        raise CoordinatorAway(str(error)) from error
