"""One cluster for all faults: whoever breaks something waits until it is well again."""

from collections.abc import Iterator

import pytest

from e2e_cluster import ShoalOnNodes, shoal_on_nodes
from faults_on_nodes.runs import Work, put_work, wait_until_well


@pytest.fixture(scope="session")
def on_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShoalOnNodes]:
    """Shoal on three nodes; the store of the control plane can be slowed."""
    with shoal_on_nodes(tmp_path_factory.mktemp("shoal"), slowable_store=True) as shoal:
        yield shoal


@pytest.fixture(scope="session")
def work(on_nodes: ShoalOnNodes) -> Work:
    """What jobs do here."""
    return put_work(on_nodes)


@pytest.fixture
def shoal(on_nodes: ShoalOnNodes, work: Work) -> ShoalOnNodes:
    """The cluster, with everything well."""
    wait_until_well(on_nodes)
    return on_nodes
