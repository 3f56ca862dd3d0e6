"""A standalone coordinator's enrolment service, in this process; each user has a state folder."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.invitations import Kind
from shoal_cli.standalone.serving import Standalone, listen
from shoal_cluster.ports import lasting_port
from shoal_protocol.join_lines import JoinLine


@dataclass(frozen=True)
class Shelf:
    """A coordinator's folder, and where its enrolment service listens."""

    folder: Folder

    def line(self, kind: Kind, lifetime: timedelta = timedelta(hours=1)) -> JoinLine:
        return self.folder.line(self.folder.invitations.add(kind, datetime.now(UTC), lifetime))


@pytest.fixture
async def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shelf]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    standalone = Standalone(
        folder=Folder(tmp_path / "shelf"), host="127.0.0.1", port=lasting_port(in_a_row=2)
    )
    now = datetime.now(UTC)
    with standalone.folder.locked():
        listener = await listen(standalone, standalone.folder.authority(now))
        standalone.folder.note_address(standalone.host, standalone.port)
        yield Shelf(standalone.folder)
        await listener.stop(None)
