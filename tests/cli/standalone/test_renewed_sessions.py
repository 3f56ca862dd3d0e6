"""A device that joined by a line opens another session in time: none outlives its certificate."""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from shoal_cli.standalone import serving as standalone_serving
from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.invitations import Kind
from shoal_cli.standalone.serving import Standalone, coordinator_process, listen
from shoal_cluster.ports import lasting_port
from shoal_coordinator.server import Coordinator, CoordinatorSettings, serving
from shoal_protocol.pki.enrolment import EnrolmentService

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


@pytest.mark.slow
async def test_a_session_gives_way_to_one_with_the_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = partial(EnrolmentService, lifetime=SOON)
    monkeypatch.setattr(standalone_serving, "EnrolmentService", brief)
    place, now = standalone(tmp_path), datetime.now(UTC)
    folder = place.folder
    with folder.locked():
        authority = folder.authority(now)
        folder.renew(authority, now)
        folder.note_address(place.host, place.port)
        listener = await listen(place, authority)
        settings = CoordinatorSettings(
            listen=f"127.0.0.1:{place.port}",
            store=folder.store,
            state=folder.store / "state",
            credentials=folder.credentials,
            sessions_expire=True,
        )
        line = str(folder.line(folder.invitations.add(Kind.DEVICE, now, timedelta(hours=1))))
        command = [sys.executable, "-m", "shoal_agent", line, "--name", "pi-4", "--budget", "16Mi"]
        command += ["--cache", str(tmp_path / "cache"), "--listen", "127.0.0.1:0"]
        command += ["--identity-folder", str(tmp_path / "identity"), "--speed", os.devnull]
        said = tmp_path / "agent.err"
        async with serving(settings) as coordinator:
            with said.open("wb") as errors:
                agent = await asyncio.create_subprocess_exec(*command, stderr=errors)
            await until_session(coordinator, "pi-4", 2)
            agent.terminate()
            await agent.wait()
        await listener.stop(None)
    assert "no session: its certificate was renewed" in said.read_text()


def test_a_standalone_coordinator_ends_sessions_with_their_certificates(tmp_path: Path) -> None:
    """Else who is forgotten would stay for as long as the connection does."""
    assert "--sessions-expire" in coordinator_process(standalone(tmp_path)).command
