"""Network namespaces as hosts: each with an address, a home folder, and processes of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal_cli.local.cgroups import DeviceGroup

NETWORK = "10.99.0"
PATIENCE_SECONDS = 180.0
_BURST: Final = "16kb"


@dataclass
class Host:
    """A host of the network; what it starts is gone with it."""

    namespace: str
    address: str
    home: Path
    switch: str
    port: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    group: DeviceGroup | None = None
    """The control group of what it starts."""
    _asked: subprocess.Popen[bytes] | None = None

    def start(
        self, name: str, *arguments: str | Path, asked: bool = False
    ) -> subprocess.Popen[bytes]:
        """A Python module or script, with its output in the file `name`; where it is `asked`, it
        reads from a pipe, and its answers come over another."""
        command = [str(each) for each in self._command(*arguments)]
        command = command if self.group is None else self.group.enter(command)
        pipe = subprocess.PIPE
        with (self.home / name).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=pipe if asked else None,
                stdout=pipe if asked else log,
                stderr=log,
                env=self._environment(),
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self._command(*arguments),
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def shoal(self, *arguments: str | Path, check: bool = True) -> Any:
        return self.run("-m", "shoal_cli", *arguments, check=check)

    def asked(self, command: str) -> list[dict[str, Any]]:
        """What `shoal devices` or `shoal jobs` has; nothing while the coordinator is away."""
        if self._asked is None:
            self._asked = self.start("asked", Path(__file__).with_name("asking.py"), asked=True)
        asked, answers = self._asked.stdin, self._asked.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps([command, "--json"]).encode() + b"\n")
        asked.flush()
        found: list[dict[str, Any]] = json.loads(json.loads(answers.readline()) or "[]")
        return found

    def said(self, name: str) -> str:
        return (self.home / name).read_text()

    def _command(self, *arguments: str | Path) -> list[str | Path]:
        python = (sys.executable, "-X", "faulthandler")
        return ["ip", "netns", "exec", self.namespace, *python, *arguments]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        return kept | {"HOME": str(self.home)}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process as a supervisor would; one that does not end says in its log where it is."""
    process.terminate()
    try:
        process.wait(PATIENCE_SECONDS / 2)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait()
        raise


@contextlib.contextmanager
def separate_hosts(folder: Path, *names: str) -> Iterator[list[Host]]:
    """Hosts on one network. Needs root."""
    own = f"shoal-{os.getpid()}"
    hosts = []
    try:
        _ip("netns", "add", f"{own}-switch")
        _ip("-n", f"{own}-switch", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{own}-switch", "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            address, port = f"{NETWORK}.{number}", f"port{number}"
            host = Host(f"{own}-{name}", address, folder / name, f"{own}-switch", port)
            host.home.mkdir()
            hosts.append(host)
            _connect(host)
        yield hosts
    finally:
        for process in [process for host in hosts for process in host.processes]:
            process.kill()
            process.communicate()
        for namespace in (f"{own}-switch", *(host.namespace for host in hosts)):
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def limit_rate(host: Host, megabits_per_second: int) -> None:
    """What its link carries, in each direction."""
    for namespace, device in ((host.namespace, "eth0"), (host.switch, host.port)):
        within = ("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device)
        rate = ("rate", f"{megabits_per_second}mbit", "burst", _BURST, "latency", "400ms")
        subprocess.run([*within, "root", "tbf", *rate], check=True, capture_output=True)


def _connect(host: Host) -> None:
    _ip("netns", "add", host.namespace)
    peer = ("type", "veth", "peer", "name", host.port, "netns", host.switch)
    _ip("link", "add", "eth0", "netns", host.namespace, *peer)
    _ip("-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    within = ("-n", host.namespace)
    _ip(*within, "address", "add", f"{host.address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _ip(*within, "link", "set", link, "up")
    _ip(*within, "route", "add", "default", "dev", "eth0")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """It asks ever less often: what is asked takes others' processors."""
    ends = time.monotonic() + PATIENCE_SECONDS
    pause = 0.2
    while not holds():
        assert time.monotonic() < ends, f"still not so: {what}"
        time.sleep(pause)
        pause = min(pause * 1.3, 1.0)
