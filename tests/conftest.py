"""Fixtures that tests of every area may ask for, and the order in which several processes test."""

import os

import pytest

from cluster_fixtures import api_access, control_plane

# As in Shoal itself: the runtime would report to its maker, from a network that may be watched.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["api_access", "control_plane"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits most, for a cluster, begins first: so the rest can go on beside it."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    for turn, mark in enumerate(("nodes", "cluster")):
        if item.get_closest_marker(mark) is not None:
            return turn
    return 2
