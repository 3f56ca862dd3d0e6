"""The story of docs/install.md, on three nodes: from `helm install` to a namespace that is gone.

The tests are the story's chapters and run in its order.
"""

import re
from typing import Any

import pytest

from cluster_fixtures import MIB
from e2e_cluster import SHAPES, ShoalOnNodes
from parity_with_whole import TOLERANCE

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
ITEMS = 24
NODES = sorted(shape.name for shape in SHAPES)


@pytest.fixture(scope="module")
def read(on_nodes: ShoalOnNodes) -> ShoalOnNodes:
    """The example applied, and its job run to its end."""
    on_nodes.apply_example("ocr")
    on_nodes.wait("inferencejob/ocr", "Complete")
    return on_nodes


def test_the_job_completes_and_its_results_are_the_whole_models(read: ShoalOnNodes) -> None:
    items = read.get("inferencejob", "ocr")["status"]["items"]
    assert items == {"total": ITEMS, "active": 0, "succeeded": ITEMS, "failed": 0}
    results = read.results()
    assert len(results) == ITEMS
    assert read.difference(results) <= TOLERANCE
