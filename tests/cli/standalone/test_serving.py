"""A standalone coordinator that cannot serve says so before anybody is invited."""

import socket
from pathlib import Path

import pytest

from shoal_cli.standalone.folders import Folder
from shoal_cli.standalone.serving import Standalone, serve


@pytest.mark.parametrize("taken", [0, 1], ids=["the coordinator's", "enrolment's"])
async def test_a_port_in_use_is_told_before_lines_go_out(tmp_path: Path, taken: int) -> None:
    invited: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] - taken
        standalone = Standalone(folder=Folder(tmp_path / "shelf"), host="127.0.0.1", port=port)
        with pytest.raises(OSError, match="it is in use by another process"):
            await serve(standalone, lambda: invited.append("a line"), invited.append)
    assert not invited
