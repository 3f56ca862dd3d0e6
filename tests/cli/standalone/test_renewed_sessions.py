"""A device that joined by a line opens another session in time: none outlives its certificate."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal_cli.standalone import serving as standalone_serving
from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.invitations import Kind
from shoal_cli.standalone.serving import Standalone, coordinator_process, listen
from shoal_cluster.ports import lasting_port
from shoal_coordinator.server import Coordinator, CoordinatorSettings, serving
from shoal_protocol.pki.enrolment import EnrolmentService
from shoal_protocol.v1 import enrolment_pb2 as pb

PATIENCE_SECONDS = 60.0
SOON = timedelta(seconds=155)
"""Renewed when two thirds have passed of this, and of the five minutes before: after 3 seconds."""


def standalone(folder: Path) -> Standalone:
    port = lasting_port(in_a_row=2)
    return Standalone(folder=Folder(folder / "shelf"), host="127.0.0.1", port=port)


async def until_session(coordinator: Coordinator, device: str, number: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (known := coordinator.sessions.by_device.get(device)) is None or (
            known.number < number
        ):
            await asyncio.sleep(0.1)


@dataclass
class Shelf:
    """Where `pi-4` joins, whose certificate comes from `place`."""

    place: Standalone
    folder: Path

    @property
    def said(self) -> str:
        """What the agent has logged."""
        path = self.folder / "agent.err"
        return path.read_text() if path.exists() else ""

    @asynccontextmanager
    async def coordinator(self, port: int) -> AsyncIterator[Coordinator]:
        store = self.place.folder.store
        settings = CoordinatorSettings(
            listen=f"127.0.0.1:{port}",
            store=store,
            state=store / "state",
            credentials=self.place.folder.credentials,
            sessions_expire=True,
        )
        async with serving(settings) as coordinator:
            yield coordinator

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        invitations = self.place.folder.invitations
        token = invitations.add(Kind.DEVICE, datetime.now(UTC), timedelta(hours=1))
        line, folder = str(self.place.folder.line(token)), self.folder
        command = [sys.executable, "-m", "shoal_agent", line, "--name", "pi-4", "--budget", "16Mi"]
        command += ["--cache", str(folder / "cache"), "--listen", "127.0.0.1:0"]
        command += ["--identity-folder", str(folder / "identity"), "--speed", os.devnull]
        command += ["--log-level", "info"]
        with (folder / "agent.err").open("wb") as errors:
            agent = await asyncio.create_subprocess_exec(*command, stderr=errors)
        try:
            yield
        finally:
            agent.terminate()
            await agent.wait()


@asynccontextmanager
async def enrolling(tmp_path: Path) -> AsyncIterator[Shelf]:
    place, now = standalone(tmp_path), datetime.now(UTC)
    folder = place.folder
    with folder.locked():
        authority = folder.authority(now)
        folder.renew(authority, now)
        folder.note_address(place.host, place.port)
        listener = await listen(place, authority)
        try:
            yield Shelf(place, tmp_path)
        finally:
            await listener.stop(None)


@pytest.mark.slow
async def test_a_session_gives_way_to_one_with_the_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = partial(EnrolmentService, lifetime=SOON)
    monkeypatch.setattr(standalone_serving, "EnrolmentService", brief)
    async with (
        enrolling(tmp_path) as shelf,
        shelf.coordinator(shelf.place.port) as coordinator,
        shelf.agent(),
    ):
        await until_session(coordinator, "pi-4", 2)
    assert "no session: its certificate was renewed" in shelf.said


class FirstIsBrief(EnrolmentService):
    """Only the first certificate is to be renewed during the test."""

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolResponse:
        answer = await super().Enrol(request, context)
        self._lifetime = timedelta(days=1)
        return answer


@pytest.mark.slow
async def test_a_session_that_opens_while_the_certificate_is_renewed_gives_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that comes back answers calls that began with the certificate of before."""
    brief = partial(FirstIsBrief, lifetime=SOON)
    monkeypatch.setattr(standalone_serving, "EnrolmentService", brief)
    async with enrolling(tmp_path) as shelf:
        port = lasting_port()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while "the certificate was renewed" not in shelf.said:
                await asyncio.sleep(0.1)
            there, away = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copied(reader, away), copied(there, writer))

        slow = await asyncio.start_server(forward, "127.0.0.1", shelf.place.port)
        async with slow, shelf.coordinator(port) as coordinator, shelf.agent():
            await until_session(coordinator, "pi-4", 2)
    assert shelf.said.count("INFO pi-4: the certificate was renewed") == 1


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def test_a_standalone_coordinator_ends_sessions_with_their_certificates(tmp_path: Path) -> None:
    """Else who is forgotten would stay for as long as the connection does."""
    assert "--sessions-expire" in coordinator_process(standalone(tmp_path)).command
