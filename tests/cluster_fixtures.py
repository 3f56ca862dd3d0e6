"""A real Kubernetes for tests: a control plane, or a cluster with three nodes, one per session.

What cannot run here is skipped with the reason; nothing is built or installed by a test. Whoever
wants one of its own (to stop its parts, to slow its store, to count its writes) makes it:
`with or_skip(lambda: ControlPlane(audit=True)) as plane: ...`.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from shoal_cluster import ControlPlane, MachineLacks

T = TypeVar("T")


def or_skip(make: Callable[[], T]) -> T:
    """What `make` makes; the test is skipped, with the reason, where the machine cannot."""
    try:
        return make()
    except MachineLacks as lacking:
        pytest.skip(str(lacking))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """API server, etcd, controller-manager and scheduler; no nodes, so pods stay Pending."""
    with or_skip(ControlPlane) as plane:
        yield plane
