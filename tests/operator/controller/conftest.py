"""A control plane with the CRDs, and operators that run against it."""

import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster_fixtures import or_skip
from operator_processes import Operators, operators, prepare
from shoal_cluster import ControlPlane
from simulated_world import World, making_world


@pytest.fixture(scope="module")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """The shared control plane; a module that is marked `own_plane` has one of its own, as its
    nodes are fakes."""
    if request.node.get_closest_marker("own_plane") is None:
        yield request.getfixturevalue("control_plane")
        return
    with or_skip(ControlPlane) as made:
        yield made


@pytest.fixture(scope="module")
def account(plane: ControlPlane) -> Path:
    """The operator's own kubeconfig: what the chart allows, and nothing else."""
    return prepare(plane)


@pytest.fixture
def namespace(plane: ControlPlane, account: Path) -> str:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    plane.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def running(account: Path, tmp_path: Path) -> Iterator[Operators]:
    """Operators of the test's own."""
    with operators(tmp_path, account) as started:
        yield started


@pytest.fixture
def coordinator_process() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A coordinator without devices: agents are made once there is one. Its address and process."""
    with tempfile.TemporaryDirectory() as folder:  # A socket's path has 108 bytes at most.
        target = f"unix:{folder}/c"
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "shoal_coordinator", "--listen", target]
        process = subprocess.Popen([*command, "--store", str(store), "--exit-with-parent"])
        yield target, process
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)


@pytest.fixture
def coordinator(coordinator_process: tuple[str, "subprocess.Popen[bytes]"]) -> str:
    """Its address."""
    return coordinator_process[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """A pool of the module's own that really runs. Its links are slow, so that a job of few items
    lasts, and leaves the processors to others meanwhile."""
    folder = tmp_path_factory.mktemp("world")
    async with making_world(plane, folder, latency_milliseconds=60) as made:
        yield made
