"""The processes of a standalone coordinator: the enrolment service, and the coordinator itself.

Enrolment is at the port after the coordinator's. The coordinator is a child process, started again
when it ends; with a certificate that is renewed here, and followed there.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from shoal_cli.local.supervisor import Death, ProcessSpec, Supervisor
from shoal_cli.standalone.folders import Folder
from shoal_protocol.interpreter import module_command
from shoal_protocol.listener import Listener, refuse_if_in_use
from shoal_protocol.own_address import own_address
from shoal_protocol.pki.authority import Authority, Issued, Request
from shoal_protocol.pki.enrolment import (
    EnrolmentService,
    Grant,
    ReviewFailed,
    listen_for_enrolment,
)
from shoal_protocol.threads import in_thread

_GRACE_SECONDS: Final = 10.0
_CHECK_SECONDS: Final = 5.0
"""A clock that was behind may be set at any moment, and then nobody believes the certificate."""
_FAR_AWAY: Final = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""Addresses that are nobody's: the way to them is the way to everywhere."""
_PROCESS: Final = "coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standalone:
    """How to serve. `host` is what others reach this machine by; `arguments` are the coordinator
    process's own."""

    folder: Folder
    host: str
    port: int
    arguments: Sequence[str] = ()

    @property
    def listen(self) -> str:
        """All addresses of this machine, of the kind that the host is of."""
        return "[::]" if self.host.startswith("[") else "0.0.0.0"  # noqa: S104 - mutual TLS

    @property
    def target(self) -> str:
        """Where the coordinator itself listens."""
        return f"{self.listen}:{self.port}"


def this_host() -> str:
    """What other machines reach this one by: its address on the way to everywhere, or its name."""
    for host, port in _FAR_AWAY:
        with contextlib.suppress(OSError):
            return own_address(host, port)
    return socket.gethostname()


async def serve(
    standalone: Standalone, ready: Callable[[], None], note: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called once devices can join.

    Raises `FolderInUse`, `AuthorityUnusable`, `ProcessHopeless`, `OSError`.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    folder = standalone.folder

    def on_death(death: Death) -> None:
        note(f"{death.title} {death.cause}; starting it again")

    with folder.locked():
        authority = folder.authority(_now())
        folder.renew(authority, _now())
        folder.note_address(standalone.host, standalone.port)
        refuse_if_in_use(standalone.target)  # before lines go out, not in the log of a child
        listener = await listen(standalone, authority)
        supervisor = Supervisor(on_death)
        try:
            await supervisor.start(coordinator_process(standalone))
            ready()
            await _until_stopped(stop, supervisor, keep_renewed(folder, authority, note))
        finally:
            await supervisor.stop(grace_seconds=_GRACE_SECONDS)
            await listener.stop(None)


async def _until_stopped(
    stop: asyncio.Event, supervisor: Supervisor, renewing: Coroutine[None, None, None]
) -> None:
    """Until there is a signal; raises what ended the work before."""
    tasks = [
        asyncio.create_task(work) for work in (stop.wait(), supervisor.wait_for_failure(), renewing)
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def listen(standalone: Standalone, authority: Authority) -> Listener:
    """Serve enrolment; to be stopped. Raises `OSError`."""
    folder = standalone.folder
    shown = folder.enrolment(_now())
    reviewing = asyncio.Lock()

    async def identity() -> Issued:
        return shown

    async def review(token: str, wanted: Request) -> Grant:
        async with reviewing:  # a token is good for one key, also when two come at once
            try:
                # In any case to its end: the caller may hang up amid a record of a first use.
                return await in_thread(folder.invitations.review, token, wanted, authority, _now())
            except OSError as error:
                raise ReviewFailed(str(error)) from error

    service = EnrolmentService(review, _now)
    address = f"{standalone.listen}:{standalone.port + 1}"
    listener, _ = await listen_for_enrolment(service, address, identity)
    return listener


async def keep_renewed(
    folder: Folder,
    authority: Authority,
    note: Callable[[str], None],
    *,
    check_seconds: float = _CHECK_SECONDS,
) -> None:
    """Have the coordinator's certificate renewed when it is time. Where that fails, as on a full
    disk, the one that there is serves to its end: `note` gets each reason once."""
    said = ""
    while True:
        await asyncio.sleep(check_seconds)
        try:
            await asyncio.to_thread(folder.renew, authority, _now())
        except OSError as error:
            reason = f"the coordinator's certificate cannot be renewed: {error}; it is tried again"
            if reason != said:
                note(reason)
            said = reason
        else:
            said = ""


def coordinator_process(standalone: Standalone) -> ProcessSpec:
    """What is started. Its log tells of jobs and devices unless the arguments say otherwise. Who is
    forgotten gets no other certificate, and is gone when the last one has expired."""
    folder, files = standalone.folder, standalone.folder.credentials
    command = [*module_command("shoal_coordinator"), "--exit-with-parent"]
    command += ["--listen", standalone.target, "--store", str(folder.store)]
    command += ["--tls-ca", str(files.ca), "--tls-certificate", str(files.certificate)]
    command += ["--tls-key", str(files.key), "--sessions-expire"]
    command += ["--log-level", "info", *standalone.arguments]
    return ProcessSpec(
        name=_PROCESS,
        title="the coordinator",
        command=tuple(command),
        log=folder.root / "logs" / "coordinator.log",
    )


def _now() -> datetime:
    return datetime.now(UTC)
