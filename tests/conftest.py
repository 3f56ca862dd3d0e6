"""Fixtures that tests of every area may ask for, and the order in which several processes test."""

import os

import pytest

from cluster_fixtures import api_access, control_plane

# As in Shoal itself: the runtime would report to its maker, from a network that may be watched.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["api_access", "control_plane"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: the tests of a file stay together, since they share what it starts,
    and all that needs nodes does too, so that there is one cluster at a time. What waits most, for
    a cluster, begins first.
    """
    for item in items:
        group = "nodes" if _needs(item, "nodes") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if _needs(item, "nodes"):
        return 0
    return 1 if _needs(item, "cluster") else 2


def _needs(item: pytest.Item, what: str) -> bool:
    return item.get_closest_marker(what) is not None
