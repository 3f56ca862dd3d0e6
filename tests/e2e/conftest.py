"""The clusters of these tests: one with etcd, and one with the datastore of K3s."""

from collections.abc import Iterator

import pytest

from e2e_cluster import ShoalOnNodes, shoal_on_nodes


@pytest.fixture(scope="module", params=["etcd", pytest.param("kine", marks=pytest.mark.minutes)])
def on_nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ShoalOnNodes]:
    """A cluster with Shoal for the whole story, on either store; kine keeps its data in SQLite."""
    with shoal_on_nodes(tmp_path_factory.mktemp(request.param), store=request.param) as shoal:
        yield shoal
