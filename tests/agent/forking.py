"""Agents that are forked from one process that has imported them, which takes most of a start.

For tests that do not look at what memory an agent takes, or at how it starts.
"""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class ForkedProcess:
    """What tests use of `asyncio.subprocess.Process`, of a child of the server."""

    def __init__(self, pid: int, server: "ForkServer") -> None:
        self.pid = pid
        self._server = server
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        if self._returncode is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([descriptor], [], [], 0)
            finally:
                os.close(descriptor)
            if ended:
                self._returncode = self._server.ask(ended=self.pid)
        return self._returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing, if it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    async def wait(self) -> int:
        """Until it ends; how."""
        if self.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The process that forks, from `start` until `stop`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        script = Path(__file__).with_name("fork_server.py")
        self._process = subprocess.Popen(
            [sys.executable, "-OO", script], stdin=theirs.fileno(), env=dict(environment)
        )
        theirs.close()
        self._connection = ours
        self._lines = ours.makefile("rw")

    def start(
        self, arguments: Sequence[str], errors: Path, environment: Mapping[str, str]
    ) -> ForkedProcess:
        """An agent with these arguments."""
        pid = self.ask(arguments=list(arguments), errors=str(errors), environment=dict(environment))
        return ForkedProcess(pid, self)

    def ask(self, **request: object) -> int:
        """What the server answers."""
        self._lines.write(f"{json.dumps(request)}\n")
        self._lines.flush()
        return int(self._lines.readline())

    def stop(self) -> None:
        """End it, and with it all that it has started."""
        self._lines.close()
        self._connection.close()
        self._process.wait()
