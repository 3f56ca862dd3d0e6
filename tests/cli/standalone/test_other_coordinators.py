"""A device that joined one coordinator, and is then given another one's line."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from cli.standalone.conftest import Shelf
from shoal_agent.enrolment.identity import Enrolment, Identity
from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.invitations import Kind
from shoal_cli.standalone.serving import Standalone, listen
from shoal_cluster.ports import lasting_port
from shoal_protocol.pki.authority import is_issued_by

PATIENCE_SECONDS = 60.0


async def test_a_device_that_joined_the_wrong_coordinator_joins_the_right_one_at_once(
    shelf: Shelf, tmp_path: Path
) -> None:
    right = Standalone(
        folder=Folder(tmp_path / "right"), host="127.0.0.1", port=lasting_port(in_a_row=2)
    )
    with right.folder.locked():
        authority = right.folder.authority(datetime.now(UTC))
        listener = await listen(right, authority)
    right.folder.note_address(right.host, right.port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for line in (shelf.line(Kind.DEVICE), Shelf(right.folder).line(Kind.DEVICE)):
                folder, target = tmp_path / "identity", line.enrolment_target
                enrolment = Enrolment(target=target, name="pi-4", folder=folder, join=line)
                await Identity(enrolment).obtain()
        assert is_issued_by(enrolment.credentials.certificate.read_bytes(), authority.certificate)
    finally:
        await listener.stop(None)
