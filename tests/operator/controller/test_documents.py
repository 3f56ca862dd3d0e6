"""Whose ConfigMap it is that a Partition is read from."""

from dataclasses import replace
from typing import cast

import pytest

from reconcile.test_partition import cut, partition, ready_model
from reconcile.test_planned_cuts import TABLE
from shoal_api.kinds import Partition
from shoal_operator.controller.api import Api, Json
from shoal_operator.controller.documents import Documents
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.manifests import owner_reference
from shoal_operator.reconcile.planned_cuts import table_map
from shoal_operator.reconcile.resources import Resource
from shoal_operator.reconcile.snapshot import StoredTable

CUT = partition(fragments=3)
AGAIN = replace(CUT, metadata=replace(CUT.metadata, uid="another"))


class Server:
    """An API server with one object of a Partition, and what its metadata says besides."""

    def __init__(self, child: Manifest, of: Partition, **more: object) -> None:
        metadata = child["metadata"]
        assert isinstance(metadata, dict)
        owners = [owner_reference(of, controller=True)]
        metadata = {**metadata, "uid": "c", "ownerReferences": owners, **more}
        self._found = {**child, "metadata": metadata}

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return self._found


@pytest.mark.parametrize(
    ("of", "more", "there"),
    [
        (CUT, {}, True),
        (AGAIN, {}, False),
        (CUT, {"deletionTimestamp": "2026-03-01T12:00:00Z"}, False),
        (CUT, {"ownerReferences": []}, False),
    ],
    ids=["its own", "of one that is gone", "leaving", "of nobody"],
)
async def test_a_partition_is_read_from_a_config_map_that_is_its_own_and_stays(
    of: Partition, more: dict[str, object], there: bool
) -> None:
    _, decision = cut(CUT, ready_model())
    table = table_map(CUT, StoredTable(recipe="r", table=TABLE))
    documents, tables = (
        Documents(cast("Api", Server(child, CUT, **more))) for child in (*decision.children, table)
    )
    assert (await documents.read(of) is not None) is there
    assert (await tables.read_table(of) is not None) is there
