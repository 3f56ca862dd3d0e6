"""Fixtures that tests of every area may ask for, and the order in which several processes test."""

import os
from collections.abc import Generator

import pytest

from cluster_fixtures import SHARED_PLANE, api_access, control_plane

# As in Shoal itself: the runtime would report to its maker, from a network that may be watched.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["api_access", "control_plane"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits most, for a cluster, begins first: so the rest can go on beside it.

    Tests of one control plane, or of one file that starts processes, belong to one test process.
    """
    items.sort(key=_turn)
    for item in items:
        if not {"control_plane", "api_access"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("control-plane"))
        elif item.get_closest_marker("real") is not None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _turn(item: pytest.Item) -> int:
    for turn, mark in enumerate(("nodes", "cluster", "real")):
        if item.get_closest_marker(mark) is not None:
            return turn
    return 3


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
