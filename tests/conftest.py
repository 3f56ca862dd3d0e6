"""Fixtures that tests of every area may ask for, and the order in which several processes test."""

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from cluster_fixtures import SHARED_PLANE, api_access, control_plane

# As in Shoal itself: the runtime would report to its maker, from a network that may be watched.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# As for Shoal's own processes: to start these threads takes longer than to import numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A shell that starts the check in the background has it ignore Ctrl-C, and what it starts as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Plans of tests are the same on every machine, and none of them waits for its measurement.
os.environ.setdefault("SHOAL_SPEED", os.devnull)

# A test asserts no time: examples may take long to draw and to run where other processes compute.
# A check is right or wrong whenever it runs: its examples are the same each time. `make thorough`
# seeks others.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("seeking", _PATIENT)
settings.register_profile("repeating", _PATIENT, derandomize=True)
settings.load_profile("repeating")

__all__ = ["api_access", "control_plane"]

ON_THE_SHARED_PLANE = {
    "tests/api/test_kinds_on_cluster.py",
    "tests/cluster/test_control_plane.py",
    "tests/examples/test_examples_on_a_cluster.py",
    "tests/operator/controller/test_beginnings.py",
    "tests/operator/controller/test_kueue.py",
    "tests/operator/controller/test_leading.py",
    "tests/operator/controller/test_login.py",
    "tests/operator/controller/test_on_a_control_plane.py",
    "tests/operator/controller/test_pools.py",
    "tests/operator/controller/test_rights.py",
    "tests/operator/reconcile/test_accepted.py",
}


class OneProcessPerFile(LoadScopeScheduling):  # type: ignore[misc] # it ships no types
    """Gives each file whole to one test process; files of one control plane to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "control plane" if file in ON_THE_SHARED_PLANE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Whatever `--dist` says: parts of a file would each make its cluster, or its pool, anew."""
    return OneProcessPerFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits most, for a cluster, begins first: so the rest can go on beside it. Then what
    takes long, so that no process is alone with it in the end.
    """
    for file in {_file(item) for item in items if _shares_the_plane(item)} - ON_THE_SHARED_PLANE:
        raise pytest.UsageError(f"{file} shares a control plane, and is not listed in conftest.py")
    items.sort(key=_turn)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _shares_the_plane(item: pytest.Item) -> bool:
    names: list[str] = getattr(item, "fixturenames", [])
    return "control_plane" in names or "api_access" in names


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected lives as long as the process: looking through it for garbage,
    time and again, would find none.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _turn(item: pytest.Item) -> int:
    for turn, mark in enumerate(("nodes", "cluster", "slow", "real")):
        if item.get_closest_marker(mark) is not None:
            return turn
    return 4


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """End the shared control plane before the first test that has no use for it."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.get_closest_marker("cluster") is None:
            SHARED_PLANE.stop()


def pytest_sessionfinish() -> None:
    """An interrupted session leaves none either."""
    SHARED_PLANE.stop()
