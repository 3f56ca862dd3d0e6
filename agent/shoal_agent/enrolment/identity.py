"""The device's identity where nobody has given it one: obtained, stored, renewed.

`shoal_protocol.pki.request` does the work, in a process that ends at once; here is when. What is in
the folder and still valid is used without asking anybody, so that an agent that starts again does
not depend on who signs. When two thirds of a certificate's life have passed a new one is fetched
beside the session that runs; whatever connects after that shows the new one, since the paths of
`Credentials` stay the same and are read at every connection.

The folder must belong to this user alone: whoever else may write there could plant a key, and would
have a certificate for it.

A certificate may be of no use long before it ends: the pool has another authority. A handshake that
fails does not say so for sure, so whoever finds no session for half a minute asks for a new
identity, and again later and later, at most every ten minutes. A coordinator that was only away
costs an enrolment or two.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_agent.telemetry.logs import log
from shoal_protocol.channels import Credentials
from shoal_protocol.interpreter import module_command
from shoal_protocol.join_lines import JoinLine

_SHORTEST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_PROCESS_SECONDS: Final = 60.0
_STEP_SECONDS: Final = 600.0
_TOKEN_BYTES: Final = 16 << 10
_DOUBT_SECONDS: Final = (30.0, 600.0)


class EnrolmentFailed(Exception):
    """No certificate this time; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """Where a device gets its certificate: the `target`, the name that it is to have, and the
    folder that it all goes to. `ca` is the authority to trust there and `token` the file of a
    token, which others may replace; a join line says both itself."""

    target: str
    name: str
    folder: Path
    ca: Path | None = None
    token: Path | None = None
    join: JoinLine | None = None

    def order(self) -> dict[str, str]:
        """As `shoal_protocol.pki.request` takes it. Raises `OSError`, `ValueError`."""
        order = {"target": self.target, "name": self.name, "folder": str(self.folder)}
        if self.join is not None:
            return order | {"token": self.join.token, "fingerprint": self.join.fingerprint}
        assert self.token is not None, "there is a join line, or a token"
        token = self.token.read_bytes()[: _TOKEN_BYTES + 1].decode().strip()
        return order | {"token": token, "ca": str(self.ca)}

    @property
    def fingerprint(self) -> str:
        """Of the certificate that the coordinator shows who joins; empty without a join line."""
        return "" if self.join is None else self.join.fingerprint

    @property
    def credentials(self) -> Credentials:
        """Where the current identity is, once there is one."""
        return Credentials.of_folder(self.folder / "current")


class Identity:
    """Obtains an identity and renews it. `why` says what went wrong last."""

    def __init__(
        self,
        enrolment: Enrolment,
        shortest_pause_seconds: float = _SHORTEST_PAUSE_SECONDS,
        doubt_seconds: tuple[float, float] = _DOUBT_SECONDS,
    ) -> None:
        """`doubt_seconds`: for how long nobody lets the device in before it asks for another
        identity, the first time and at most."""
        self._enrolment = enrolment
        self._shortest = shortest_pause_seconds
        self._doubt_seconds = doubt_seconds
        self._patience = doubt_seconds[0]
        self._refused_since: float | None = None
        self._doubted = asyncio.Event()
        self._renew_at = self._due = math.inf
        self.why = "not asked yet"
        self.obtained = False
        self.renewed = 0
        """How often, since it was obtained."""

    async def obtain(self) -> None:
        """Until there is a valid identity: the one in the folder, else a new one."""
        known = self._stored()
        if known is None:
            await self._renew()
        else:
            self._renew_at = known
            log.info("resuming with the identity in %s", self._enrolment.folder)
        self.obtained = True

    async def renewals(self) -> AsyncIterator[None]:
        """Renew in time, or when in doubt, for ever, and say when that was done."""
        while True:
            with contextlib.suppress(TimeoutError):
                # In steps: a clock that is set does not make a certificate live longer.
                async with asyncio.timeout(min(_STEP_SECONDS, max(0.0, self._left()))):
                    await self._doubted.wait()
            if self._doubted.is_set() or self._left() <= 0:
                await self._renew()
                self._doubted.clear()
                self.renewed += 1
                log.info("the certificate was renewed")
                yield

    @property
    def ends_sessions(self) -> bool:
        """Whether a session ends with the certificate that it was opened with: where one joins by a
        line, the coordinator and who signs are never away without each other."""
        return self._enrolment.join is not None

    def _left(self) -> float:
        """Seconds until it is to be renewed. What was in the folder says when by the clock of who
        signed it; from then on only the time that passes here counts, whatever the clock says."""
        return min(self._renew_at - time.time(), self._due - _elapsed())

    def accepted(self, renewed: int) -> bool:
        """There is a session, opened when it had been renewed so often; whether that has to give
        way to one with the certificate that came meanwhile."""
        self._refused_since, self._patience = None, self._doubt_seconds[0]
        return self.ends_sessions and renewed != self.renewed

    def refused(self) -> None:
        """No session could be opened; this may be why, if that continues."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since >= self._patience:
            log.info("no session for %.0f s: asking for another identity", self._patience)
            self._refused_since = now
            self._patience = min(self._doubt_seconds[1], 2 * self._patience)
            self._doubted.set()

    async def _renew(self) -> None:
        """Ask until there is an answer, later and later; half of the pause is chance."""
        pause = self._shortest
        while True:
            try:
                lasts = await self._enrol()
                self._due, self._renew_at = _elapsed() + max(lasts, self._shortest), math.inf
            except (EnrolmentFailed, OSError) as error:  # no memory for a process, for one
                if str(error) != self.why:
                    log.warning("not enrolled: %s", error)
                self.why = str(error)
            else:
                return
            await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311 - no secret
            pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause)

    def _stored(self) -> float | None:
        """When the identity in the folder is to be renewed; None: there is no valid one."""
        path = self._enrolment.folder / "current" / "identity.json"
        with contextlib.suppress(OSError, ValueError, EnrolmentFailed):
            _check_private(self._enrolment.folder)
            match json.loads(path.read_bytes()):
                case {"fingerprint": of} if of != self._enrolment.fingerprint:
                    return None  # another coordinator's, which this one does not believe
                case {"name": self._enrolment.name, "renew_at": renew_at, "expires_at": expires_at}:
                    return float(renew_at) if time.time() < float(expires_at) else None
        return None

    async def _enrol(self) -> float:
        """One try, in a process of its own; in how many seconds the result is to be renewed. Raises
        `EnrolmentFailed`, `OSError`."""
        with contextlib.suppress(FileNotFoundError):  # the process makes it
            _check_private(self._enrolment.folder)
        try:
            order = self._enrolment.order()
        except (OSError, ValueError) as error:
            raise EnrolmentFailed(f"the token cannot be read: {error}") from error
        process = await asyncio.create_subprocess_exec(
            *module_command("shoal_protocol.pki.request", "-OO"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        # Where memory is short it is this process that has to go, not the agent with its work.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        try:
            async with asyncio.timeout(_PROCESS_SECONDS):
                answer, complaint = await process.communicate(json.dumps(order).encode())
        except TimeoutError as error:
            raise EnrolmentFailed("no answer in time") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = complaint.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise EnrolmentFailed(lines[-1])
        with contextlib.suppress(ValueError):
            match json.loads(answer):
                case {"renew_after_seconds": float(lasts)}:
                    return lasts
        raise EnrolmentFailed(f"the step answers {answer[:200]!r}")


def _elapsed() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _check_private(folder: Path) -> None:
    """Raise `EnrolmentFailed` for a folder that is, or may be written to, by other users."""
    status = folder.stat()
    for owner in (folder.lstat().st_uid, status.st_uid):
        if owner != os.geteuid():
            raise EnrolmentFailed(
                f"{folder} belongs to user {owner}; "
                "name a folder of this user's own with --identity-folder"
            )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EnrolmentFailed(f"{folder} may be written by other users; chmod 700 {folder}")
