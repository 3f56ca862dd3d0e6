"""A standalone coordinator that cannot serve says so before anybody is invited."""

import socket
from pathlib import Path

import pytest

from shoal_cli.standalone import serving
from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.serving import Standalone, serve, this_host


@pytest.mark.parametrize("taken", [0, 1], ids=["the coordinator's", "enrolment's"])
async def test_a_port_in_use_is_told_before_lines_go_out(tmp_path: Path, taken: int) -> None:
    invited: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] - taken
        standalone = Standalone(folder=Folder(tmp_path / "shelf"), host="127.0.0.1", port=port)
        with pytest.raises(OSError, match="it is in use by another process"):
            await serve(standalone, lambda: invited.append("a line"), invited.append)
    assert not invited


@pytest.mark.parametrize(
    ("ways", "host"),
    [
        ({"192.0.2.1": "192.168.1.10", "2001:db8::1": "fd00::10"}, "192.168.1.10"),
        ({"2001:db8::1": "fd00::10"}, "fd00::10"),
        ({}, socket.gethostname()),
    ],
    ids=["IPv4 and IPv6", "IPv6 alone", "no network yet"],
)
def test_others_reach_a_coordinator_by_an_address_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch, ways: dict[str, str], host: str
) -> None:
    def own_address(far_away: str, port: int) -> str:
        if far_away not in ways:
            raise OSError("Network is unreachable")
        return ways[far_away]

    monkeypatch.setattr(serving, "own_address", own_address)
    assert this_host() == host
