"""`shoal top` on a coordinator that goes away."""

import contextlib
import io
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from shoal_cli.commands import tables, targets, top
from shoal_cli.transfer.joined import CoordinatorAway
from shoal_protocol.v1 import coordinator_pb2 as pb


async def test_a_picture_that_is_old_says_so_until_the_coordinator_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [pb.Overview(devices=[pb.DeviceOverview()])]
    drawn = io.StringIO()
    console = Console(file=drawn, width=100, height=24, force_terminal=True, color_system=None)

    @contextlib.asynccontextmanager
    async def watching(target: targets.Target) -> AsyncIterator[tuple[str, None]]:
        yield "pool shelf", None

    async def overview(client: None) -> pb.Overview:
        if not answers:
            raise CoordinatorAway("unix:/s: gone")
        return answers.pop()

    monkeypatch.setattr(targets, "watching", watching)
    monkeypatch.setattr(targets, "overview", overview)
    monkeypatch.setattr(tables, "output", lambda: console)
    monkeypatch.setattr(top, "RECONNECT_SECONDS", 0.2)
    with pytest.raises(CoordinatorAway):
        await top._watch(targets.Target(), 0.05)
    first, *later = [line for line in drawn.getvalue().splitlines() if "pool shelf" in line]
    assert "no answer" not in first
    assert later
    assert all("pool shelf, no answer for 0 s: 1 of 1 device ready" in line for line in later)
