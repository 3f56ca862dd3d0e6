"""A control plane with the CRDs, and operators that run against it."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_fixtures import or_skip
from operator_processes import Operators, operators, prepare
from shoal_cluster import ControlPlane


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane of the module's own, whose writes are counted."""
    with or_skip(lambda: ControlPlane(audit=True)) as plane:
        yield plane


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
