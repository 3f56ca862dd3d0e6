"""A real Kubernetes for tests: a control plane, one per session.

What cannot run here is skipped with the reason; nothing is built or installed by a test: that is
for `make cluster-build`. Whoever wants one of its own (to stop its parts, to slow its store, to
count its writes) makes it: `with or_skip(lambda: ControlPlane(audit=True)) as plane: ...`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from shoal_cluster import Access, ControlPlane, MachineLacks

T = TypeVar("T")
MIB = 2**20


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


@pytest.fixture(scope="session")
def api_access(request: pytest.FixtureRequest) -> Access:
    """Kubectl and helm with full rights on a control plane: ours, or that of $SHOAL_KUBECONFIG.

    For tests that need an API server and its controllers, and no part of it stopped.
    """
    if offered := os.environ.get("SHOAL_KUBECONFIG"):
        return Access(Path(offered))
    plane = request.getfixturevalue("control_plane")
    assert isinstance(plane, ControlPlane)
    return plane.access
