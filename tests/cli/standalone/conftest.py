"""A standalone coordinator's enrolment service, in this process; each user has a state folder."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socket import socket

import pytest

from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.invitations import Kind
from shoal_cli.standalone.serving import Standalone, listen
from shoal_protocol.join_lines import JoinLine


@dataclass(frozen=True)
class Shelf:
    """A coordinator's folder, and where its enrolment service listens."""

    folder: Folder

    def line(self, kind: Kind, lifetime: timedelta = timedelta(hours=1)) -> JoinLine:
        return self.folder.line(self.folder.invitations.add(kind, datetime.now(UTC), lifetime))


def free_port() -> int:
    """One with a free one after it, so far as anybody can know."""
    for _ in range(100):
        with socket() as first, socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports in a row")


@pytest.fixture
async def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shelf]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    standalone = Standalone(folder=Folder(tmp_path / "shelf"), host="127.0.0.1", port=free_port())
    now = datetime.now(UTC)
    with standalone.folder.locked():
        listener = await listen(standalone, standalone.folder.authority(now))
        standalone.folder.note_address(standalone.host, standalone.port)
        yield Shelf(standalone.folder)
        await listener.stop(None)
