"""A real Kubernetes for tests: a control plane that the tests of a process share.

What cannot run here is skipped with the reason; nothing is built or installed by a test: that is
for `make cluster-build`. Whoever wants one of its own (to stop its parts, to slow its store, to
count its writes) makes it: `with or_skip(lambda: ControlPlane(audit=True)) as plane: ...`.
"""

import contextlib
import os
from collections.abc import Callable
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


class SharedPlane:
    """One control plane, from the first test that asks for it until `stop`.

    Not a fixture of the session: those live as long as their process tests, and an idle control
    plane takes a twentieth of a processor.
    """

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._plane: ControlPlane | None = None

    def start(self) -> ControlPlane:
        """The one that runs, or a new one; the test is skipped where the machine cannot."""
        if self._plane is None:
            self._plane = self._held.enter_context(or_skip(lambda: ControlPlane(audit=True)))
        return self._plane

    def stop(self) -> None:
        """End it, if it runs."""
        self._plane = None
        self._held.close()


SHARED_PLANE = SharedPlane()


@pytest.fixture(scope="module")
def control_plane() -> ControlPlane:
    """API server, etcd, controller-manager and scheduler; no nodes, so pods stay Pending."""
    return SHARED_PLANE.start()


@pytest.fixture(scope="module")
def api_access(request: pytest.FixtureRequest) -> Access:
    """Kubectl and helm with full rights on a control plane: ours, or that of $SHOAL_KUBECONFIG.

    For tests that need an API server and its controllers, and no part of it stopped.
    """
    if offered := os.environ.get("SHOAL_KUBECONFIG"):
        return Access(Path(offered))
    plane = request.getfixturevalue("control_plane")
    assert isinstance(plane, ControlPlane)
    return plane.access
