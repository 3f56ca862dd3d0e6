"""An agent goes on trying to reach its coordinator, whatever is away for a while: the network, its
files, the folder for its activations."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agent.conftest import AgentProcess, Joined, environment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from certificates import Pki
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
StartAgent = Callable[..., Awaitable[AgentProcess]]


async def said(agent: AgentProcess, words: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while words not in agent.errors.read_text():
            await asyncio.sleep(0.05)


@pytest.fixture
def no_network() -> list[str]:
    """What runs a command in a network namespace in which nothing is up."""
    command = ["unshare", "--net"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace can be made here: not root")
    return command


@pytest.mark.real
@pytest.mark.parametrize("host", ["192.168.1.10", "shelf.local"])
def test_an_enrolled_agent_waits_for_a_network_that_comes_late(
    folder: Path, no_network: list[str], host: str
) -> None:
    own, identity = Pki(folder / "pki").issue("pi-4"), folder / "identity"
    current = identity / "current"
    current.mkdir(parents=True, mode=0o700)
    identity.chmod(0o700)
    for source, name in (
        (own.ca, "ca.pem"),
        (own.certificate, "certificate.pem"),
        (own.key, "key.pem"),
    ):
        shutil.copy(source, current / name)
    day = time.time() + 86_400
    known = {"name": "pi-4", "renew_at": day, "expires_at": day, "token": "x"}
    (current / "identity.json").write_text(json.dumps(known))
    line = f"shoal://{host}:7400/{'a' * 64}/{'t' * 32}"
    command = [*no_network, sys.executable, "-OO", "-m", "shoal_agent", line, "--name", "pi-4"]
    command += ["--budget", "64Mi", "--cache", str(folder / "cache"), "--speed", "/dev/null"]
    command += ["--identity-folder", str(identity), "--log-level", "info"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        waits = next((each for each in agent.stderr if "trying again" in each), None)
        assert waits is not None, "it has ended"
        assert f"no way to {host}:7400" in waits
        assert agent.poll() is None
        agent.kill()


@pytest.mark.forked
async def test_a_certificate_that_is_away_while_a_session_breaks_is_waited_for(
    folder: Path, start_agent: StartAgent, store: Path
) -> None:
    pki, coordinator = Pki(folder / "pki"), ScriptedCoordinator(store)
    port = await coordinator.start("127.0.0.1:0", pki.issue("shelf-coordinator"))
    own = pki.issue("pi-4")
    tls = ["--tls-ca", own.ca, "--tls-certificate", own.certificate, "--tls-key", own.key]
    try:
        agent = await start_agent(
            "pi-4", "--coordinator", f"localhost:{port}", "--relayed", *map(str, tls)
        )
        device = await asyncio.wait_for(coordinator.device(), PATIENCE_SECONDS)
        content = own.certificate.read_bytes()
        own.certificate.unlink()
        device.send(welcome=pb.Welcome())  # a second one ends a session
        await said(agent, "No such file")
        own.certificate.write_bytes(content)
        again = await asyncio.wait_for(coordinator.device(), PATIENCE_SECONDS)
        assert again.hello.device == "pi-4"
    finally:
        await coordinator.stop()


@pytest.mark.forked
async def test_what_stays_in_the_folder_of_activations_ends_no_agent(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    joined = await join()
    stays = joined.agent.cache / "activations" / "nfs"
    stays.mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(stays)]  # as what NFS keeps of an open file
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here: not root")
    try:
        joined.device.send(welcome=pb.Welcome())  # a second one ends a session
        again = await asyncio.wait_for(coordinator.device(), PATIENCE_SECONDS)
        assert again.hello.device == "pi-4"
    finally:
        subprocess.run(["umount", str(stays)], check=True)
