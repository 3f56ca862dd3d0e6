"""Children that are not watched, on a real API server, where others delete and edit them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from reconcile.values import pool
from shoal_api.schema import API_VERSION
from shoal_api.writing import write
from shoal_cluster import ControlPlane
from shoal_operator.controller.api import Api
from shoal_operator.controller.children import LOOK_SECONDS, REPAIR_SECONDS, Children, NameTaken
from shoal_operator.controller.event_router import EventRouter
from shoal_operator.controller.foreign import Identity, identity_of
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.resources import CONFIG_MAP

pytestmark = [pytest.mark.cluster, pytest.mark.real]


class Shelf:
    """A pool and its ConfigMap, and the clock of the operator that applies it."""

    def __init__(self, plane: ControlPlane, api: Api, namespace: str) -> None:
        self.plane, self.api, self.namespace = plane, api, namespace
        self.now = 0.0
        self.children = self.starts()

    def starts(self) -> Children:
        """Those of an operator that knows nothing yet."""
        return Children(self.api, EventRouter().cache, lambda: self.now, lambda _: None)

    def owner(self) -> Identity:
        return identity_of(
            self.plane.access.get("devicepool", "shelf", f"--namespace={self.namespace}")
        )

    async def apply(self) -> bool:
        """Whether something was written."""
        metadata = {"name": "shelf-told", "namespace": self.namespace}
        manifest: Manifest = CONFIG_MAP.manifest(metadata, data={"size": "5"})
        return await self.children.apply(manifest, self.owner())

    async def later(self, seconds: float = LOOK_SECONDS) -> bool:
        self.now += seconds
        return await self.apply()

    def kubectl(self, verb: str, *arguments: str) -> None:
        self.plane.kubectl(
            verb, "configmap", "shelf-told", f"--namespace={self.namespace}", *arguments
        )

    def edit(self) -> None:
        self.kubectl("patch", "--patch", json.dumps({"data": {"size": "0"}}))

    def says(self) -> str:
        found = self.plane.access.get("configmap", "shelf-told", f"--namespace={self.namespace}")
        return str(found["data"]["size"])


@pytest_asyncio.fixture
async def shelf(plane: ControlPlane, account: Path, namespace: str) -> AsyncIterator[Shelf]:
    manifest = {"apiVersion": API_VERSION, "kind": "DevicePool", "metadata": {"name": "shelf"}}
    plane.access.apply(manifest | {"spec": write(pool().spec)}, namespace=namespace)
    api = Api(await log_in(account), Telemetry(lambda: 0.0), namespace="shoal-system")
    yield Shelf(plane, api, namespace)
    await api.close()


async def test_what_somebody_deletes_or_edits_is_there_again_when_it_is_next_wanted(
    shelf: Shelf,
) -> None:
    assert await shelf.apply()
    assert not await shelf.later(), "nobody has touched it"
    shelf.kubectl("delete")
    assert not await shelf.later(LOOK_SECONDS / 2), "it is not looked at all the time"
    assert await shelf.later(LOOK_SECONDS / 2)
    assert not await shelf.later()
    shelf.edit()
    assert await shelf.later()
    assert shelf.says() == "5"


async def test_what_was_edited_while_no_operator_ran_is_found_in_the_end(shelf: Shelf) -> None:
    assert await shelf.apply()
    shelf.edit()
    shelf.children = shelf.starts()
    assert not await shelf.apply(), "a start of the operator writes nothing"
    assert await shelf.later(REPAIR_SECONDS + 1)
    assert shelf.says() == "5"


async def test_what_somebody_else_has_made_in_its_place_stays(shelf: Shelf) -> None:
    assert await shelf.apply()
    shelf.kubectl("delete")
    shelf.kubectl("create", "--from-literal=size=theirs")
    with pytest.raises(NameTaken, match="is there already and not of Shoal"):
        await shelf.later()
    assert shelf.says() == "theirs"
