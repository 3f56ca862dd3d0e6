"""Fixtures that tests of every area may ask for, and the order in which several processes test."""

import ctypes
import gc
import os
import signal
from collections.abc import Generator, Iterable
from itertools import chain, zip_longest

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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for what is allocated next, as it comes to by itself in a
    process that allocates much. An agent in this process has it give back everything; from then on
    each array would cost page after page, and most of what the kernel does in a check is that.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


keep_freed_memory()

ON_THE_SHARED_PLANE = {
    "tests/api/test_kinds_on_cluster.py",
    "tests/api/test_pod_fields_on_cluster.py",
    "tests/api/test_unplain_on_cluster.py",
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

APART = "tests/coordinator/dispatch/test_simulation.py"
"""The one file that would keep a process busy after all others: its tests share nothing."""

_TURNS = ("nodes", "cluster", "slow", "real")
_FIRST_TO_COMPUTE = (_TURNS.index("slow"), False)


class OneProcessPerFile(LoadScopeScheduling):  # type: ignore[misc] # it ships no types
    """Gives each file but one whole to one test process; files of one control plane to the same."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Whatever `--dist` says: parts of a file would each make its cluster, or its pool, anew."""
    return OneProcessPerFile(config, log)


@pytest.hookimpl(trylast=True)  # what is left out would be a turn of nobody
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that no process is alone with it in the end: by turns what
    waits most of its time, for a cluster, and what computes, so that neither is alone either.
    """
    for file in {_file(item) for item in items if _shares_the_plane(item)} - ON_THE_SHARED_PLANE:
        raise pytest.UsageError(f"{file} shares a control plane, and is not listed in conftest.py")
    turns = {item: _turn(item) for item in items}
    items.sort(key=turns.__getitem__)
    waiting = _by_scope(item for item in items if turns[item] < _FIRST_TO_COMPUTE)
    computing = _by_scope(item for item in items if turns[item] >= _FIRST_TO_COMPUTE)
    by_turns = zip_longest(waiting, computing, fillvalue=())
    items[:] = chain.from_iterable(chain.from_iterable(by_turns))


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if file == APART:
        return nodeid
    return "control plane" if file in ON_THE_SHARED_PLANE else file


def _by_scope(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """What goes to one process, together; in the order of the first of each."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(_scope(item.nodeid), []).append(item)
    return list(found.values())


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


def _turn(item: pytest.Item) -> tuple[int, bool]:
    marks = {mark.name for mark in item.iter_markers()}
    turn = next((turn for turn, mark in enumerate(_TURNS) if mark in marks), len(_TURNS))
    return turn, "slow" not in marks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """What a test has asked of the allocator ends with it; and the shared control plane before the
    first test that has no use for it.
    """
    try:
        yield
    finally:
        keep_freed_memory()
        if nextitem is None or nextitem.get_closest_marker("cluster") is None:
            SHARED_PLANE.stop()


def pytest_sessionfinish() -> None:
    """An interrupted session leaves none either."""
    SHARED_PLANE.stop()
