"""Who sends jobs to a coordinator can watch and fetch them for longer than a certificate lasts."""

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shoal import remote
from shoal.errors import PoolFailed
from shoal.items import Items
from shoal_cli.standalone import serving as standalone_serving
from shoal_cli.standalone import watching as standalone_watching
from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.invitations import Kind
from shoal_cli.standalone.remote_pools import RemotePool
from shoal_cli.standalone.serving import Standalone, listen
from shoal_cli.standalone.watching import watching
from shoal_cli.transfer import joined
from shoal_cluster.ports import lasting_port
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.pki import request
from shoal_protocol.pki.enrolment import EnrolmentService
from shoal_protocol.v1 import coordinator_pb2 as pb

BRIEF = timedelta(seconds=10)
"""All of it is the last third: it is renewed whenever that is looked at."""


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Standalone]:
    """A coordinator's enrolment, whose certificates are brief."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(
        standalone_serving, "EnrolmentService", partial(EnrolmentService, lifetime=BRIEF)
    )
    port, now = lasting_port(in_a_row=2), datetime.now(UTC)
    standalone = Standalone(folder=Folder(tmp_path / "shelf"), host="127.0.0.1", port=port)
    folder = standalone.folder
    with folder.locked():
        authority = folder.authority(now)
        folder.renew(authority, now)
        folder.note_address(standalone.host, port)
        listener = await listen(standalone, authority)
        line = folder.line(folder.invitations.add(Kind.CLIENT, now, timedelta(hours=1)))
        await asyncio.to_thread(joined.join, line)
        yield standalone
        await listener.stop(None)


@asynccontextmanager
async def coordinator(place: Standalone) -> AsyncIterator[None]:
    settings = CoordinatorSettings(
        listen=f"127.0.0.1:{place.port}",
        store=place.folder.store,
        state=place.folder.store / "state",
        credentials=place.folder.credentials,
    )
    async with serving(settings):
        yield


async def test_results_are_fetched_after_the_first_certificate_has_ended(place: Standalone) -> None:
    async with coordinator(place):
        shelf = await asyncio.to_thread(joined.reach, f"127.0.0.1:{place.port}")
        await asyncio.sleep(BRIEF.total_seconds() + 1)
        async with shelf.calling() as client:
            assert await client.jobs() == []


async def test_a_watch_finds_a_coordinator_again_after_the_first_certificate_has_ended(
    place: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone_watching, "RENEWAL_SECONDS", 2.0)
    shelf = await asyncio.to_thread(joined.reach, f"127.0.0.1:{place.port}")
    async with watching(shelf) as watch:
        async with coordinator(place):
            assert list(await watch.poll()) == []
            await asyncio.sleep(BRIEF.total_seconds() + 1)
        await watch.poll()
        assert watch._away
        async with coordinator(place), asyncio.timeout(60):
            while watch._away:
                await asyncio.sleep(0.2)
                await watch.poll()


async def test_items_of_a_program_find_a_coordinator_after_the_first_certificate_has_ended(
    place: Standalone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pool_without_devices(target: str | None) -> RemotePool:
        return RemotePool(await asyncio.to_thread(joined.reach, target), ())

    monkeypatch.setattr(remote, "remote_pool", pool_without_devices)
    async with remote.running_there(f"127.0.0.1:{place.port}", tmp_path / "work") as run:
        items = Items(run.open_channel(), run.target, pb.SubmitJobRequest(name="m"), run.reopen)
        await asyncio.sleep(BRIEF.total_seconds() + 1)
        async with coordinator(place):
            with pytest.raises(PoolFailed, match="the coordinator refused m"):  # it was asked
                await items.compute(0, {"x": np.zeros(1, np.float32)})
            await items.close()


async def test_a_full_disk_stops_nobody_whose_certificate_is_valid_still(
    place: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enrol(order: request.Order) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", order.folder)

    shelf = await asyncio.to_thread(joined.reach, f"127.0.0.1:{place.port}")
    monkeypatch.setattr(request, "enrol", enrol)
    async with coordinator(place), shelf.calling() as client:
        assert await client.jobs() == []
    await asyncio.sleep(BRIEF.total_seconds() + 1)
    with pytest.raises(OSError, match="No space left"):
        shelf.renew()


async def test_a_renewal_that_failed_is_not_tried_again_with_every_call(
    place: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a firewall drops what is sent, each would take a minute."""
    tried = list[str]()

    def enrol(order: request.Order) -> None:
        tried.append(order.target)
        raise request.NoAnswer("nobody answers")

    def valid_for(seconds: float) -> None:
        identity = joined._folder(shelf.target) / "current" / "identity.json"
        ends = {"renew_at": 0.0, "expires_at": time.time() + seconds}
        identity.write_text(json.dumps(json.loads(identity.read_bytes()) | ends))

    shelf = await asyncio.to_thread(joined.reach, f"127.0.0.1:{place.port}")
    monkeypatch.setattr(request, "enrol", enrol)
    valid_for(3600)
    shelf.renew()
    shelf.renew()
    assert len(tried) == 1
    valid_for(-1)
    with pytest.raises(joined.CoordinatorAway, match="nobody answers"):
        shelf.renew()
    assert len(tried) == 2
