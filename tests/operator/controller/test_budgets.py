"""What a real API server and its controllers make of an agent's floor, and of one over its budget.

The node is a fake, the coordinator is real, and the device says what the test has it say.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster_fixtures import or_skip
from coordinator.scripted import ScriptedDevice, connected, put_model
from fake_node import GRACE_SECONDS, FakeNode, Process, run_nodes
from operator_processes import ACCOUNT, Operators, wait_until
from shoal_cluster import ControlPlane
from shoal_operator.controller.actions import Actions
from shoal_operator.controller.api import Api
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.decision import TellBudget
from shoal_protocol import PROTOCOL
from shoal_protocol.v1 import session_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
BUDGET = 64 * MIB
FLOOR = 45 * MIB
ALLOWED = str(96 * MIB + BUDGET)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own, with a fake node."""
    with or_skip(lambda: ControlPlane(node_grace_seconds=GRACE_SECONDS)) as made:
        yield made


class Shelf:
    """The pool `shelf` of one node, and what is made of it."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self.namespace = namespace

    def make_volume(self) -> None:
        """For its coordinator's claim; nothing mounts it."""
        claim = {"namespace": self.namespace, "name": "shelf-coordinator"}
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "5Gi"},
            "hostPath": {"path": "/nowhere"},
            "claimRef": claim,
        }
        metadata = {"name": f"volume-of-{self.namespace}"}
        manifest = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata}
        self._plane.access.apply({**manifest, "spec": spec})

    def apply_pool(self, memory: str = "64Mi") -> None:
        manifest = {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "DevicePool",
            "metadata": {"name": "shelf"},
            "spec": {"nodeSelector": {"shelf": "yes"}, "budget": {"memory": memory}},
        }
        self._plane.access.apply(manifest, namespace=self.namespace)

    def all(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]]
        found = self._plane.access.get(kind, f"--namespace={self.namespace}")["items"]
        return found

    def device(self) -> dict[str, Any]:
        return next((each.get("status", {}) for each in self.all("devices")), {})

    def within_budget(self) -> dict[str, Any]:
        conditions = self.device().get("conditions", [])
        return next((each for each in conditions if each["type"] == "WithinBudget"), {})

    def says(self, text: str) -> bool:
        """Whether the Device's message about its budget ends so."""
        return str(self.within_budget().get("message", "")).endswith(text)

    def pod(self) -> dict[str, Any]:
        named = (each for each in self.all("pods") if "agent" in each["metadata"]["name"])
        return next(named, {})

    def memory(self) -> tuple[str, str]:
        """What the agent's pod may use, and what it requests."""
        resources = self.pod()["spec"]["containers"][0]["resources"]
        return resources["limits"]["memory"], resources["requests"]["memory"]

    def told(self) -> int:
        """The budget that the agent reads."""
        return int(self.pod()["metadata"]["annotations"]["shoal.dev/budget"])

    def pool_condition(self, type_: str) -> dict[str, Any]:
        conditions = self.all("devicepools")[0].get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == type_), {})

    def delete_device(self) -> None:
        self._plane.kubectl("delete", "device", "--all", f"--namespace={self.namespace}")

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [each for each in self.all("events") if each["reason"] == reason]


def never(command: object) -> Process:
    raise AssertionError(f"no worker is to run: {command}")


@contextlib.asynccontextmanager
async def fake_node(plane: ControlPlane, namespace: str) -> AsyncIterator[None]:
    telemetry = Telemetry(asyncio.get_running_loop().time)
    api = Api(await log_in(plane.kubeconfig), telemetry, namespace=namespace)
    node = FakeNode(api, plane, "n1", {"shelf": "yes"}, never)
    running = asyncio.create_task(run_nodes(api, [node]))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()


@pytest.fixture
def without_resizing(plane: ControlPlane, account: Path) -> None:
    """Have every request for it refused."""
    role = plane.access.get("clusterrole", ACCOUNT)
    role["rules"] = [rule for rule in role["rules"] if "pods/resize" not in rule["resources"]]
    plane.kubectl("replace", "--filename=-", given=json.dumps(role))


async def until(what: str, true: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, what, true)


@pytest_asyncio.fixture
async def shelf_and_device(
    plane: ControlPlane, namespace: str, running: Operators, coordinator: str, tmp_path: Path
) -> AsyncIterator[tuple[Shelf, ScriptedDevice]]:
    """The pool with its one agent's pod, and a device that is not connected yet."""
    shelf = Shelf(plane, namespace)
    hello = pb.Hello(
        protocol=PROTOCOL, device="n1", incarnation=1, budget_bytes=BUDGET, floor_bytes=FLOOR
    )
    async with fake_node(plane, namespace):
        operator = running.start("--coordinator", f"{namespace}/shelf={coordinator}")
        await asyncio.to_thread(operator.wait_until_leading)
        shelf.make_volume()
        shelf.apply_pool()
        await until("the agent's pod is there", lambda: bool(shelf.pod()))
        assert shelf.memory() == (ALLOWED, ALLOWED)
        yield shelf, ScriptedDevice(coordinator, "n1", put_model(tmp_path), hello=hello)


async def test_a_pods_limit_follows_the_floor_and_an_excess_is_a_condition_and_one_event(
    shelf_and_device: tuple[Shelf, ScriptedDevice],
) -> None:
    shelf, device = shelf_and_device
    first = shelf.pod()["metadata"]["uid"]
    async with connected(device):
        lowered = str(48 * MIB + BUDGET)
        await until("its limit is lowered", lambda: shelf.memory() == (lowered, lowered))
        assert shelf.pod()["metadata"]["uid"] == first, "the agent goes on running"
        await until("the Device shows it", lambda: shelf.device().get("limitBytes") == int(lowered))
        assert shelf.within_budget()["status"] == "True"
        for peak in (126, 130):
            await device.telemetry(used_bytes=MIB, peak_bytes=peak * BUDGET // 100)
            await until(f"{peak} % is reported", partial(shelf.says, f"({peak} %)"))
        assert shelf.within_budget()["reason"] == "OverBudget"
        (event,) = shelf.events("OverBudget")
        assert (event["type"], event["involvedObject"]["kind"]) == ("Warning", "Device")
        assert event["message"] == "peaked at 80.6 MiB, budget 64 MiB (126 %)"
    (agents,) = shelf.all("daemonsets")
    assert agents["metadata"]["generation"] == 1, "what starts the pods is as it was"


async def test_an_edited_budget_is_told_to_the_pod_that_runs_and_its_limit_follows(
    shelf_and_device: tuple[Shelf, ScriptedDevice],
) -> None:
    shelf, device = shelf_and_device
    first = shelf.pod()["metadata"]["uid"]
    async with connected(device):
        before = str(48 * MIB + BUDGET)
        await until("its limit is lowered", lambda: shelf.memory() == (before, before))
        shelf.apply_pool("96Mi")
        more = str((48 + 96) * MIB)
        await until("there is room for more", lambda: shelf.memory() == (more, more))
        await until("it is told", lambda: shelf.told() == 96 * MIB)
        assert shelf.pool_condition("AgentsReady")["reason"] == "Updating"
        await device.telemetry(used_bytes=MIB, peak_bytes=MIB, budget_bytes=96 * MIB)
        await until("it is adopted", lambda: shelf.device().get("budgetBytes") == 96 * MIB)
        await until(
            "nobody is waited for",
            lambda: shelf.pool_condition("AgentsReady").get("status") == "True",
        )
        shelf.apply_pool("32Mi")
        await until("it is told less", lambda: shelf.told() == 32 * MIB)
        assert shelf.memory() == (more, more), "it has not adopted that yet"
        await device.telemetry(used_bytes=MIB, peak_bytes=MIB, budget_bytes=32 * MIB)
        less = str((48 + 32) * MIB)
        await until("its limit follows", lambda: shelf.memory() == (less, less))
        assert shelf.pod()["metadata"]["uid"] == first, "the agent goes on running"
        (agents,) = shelf.all("daemonsets")
        assert agents["spec"]["updateStrategy"] == {"type": "OnDelete"}
        (made,) = agents["spec"]["template"]["spec"]["containers"]
        assert int(made["resources"]["limits"]["memory"]) == (96 + 32) * MIB
        await until("the Device shows it", lambda: shelf.device().get("limitBytes") == int(less))
        shelf.delete_device()
        await until(
            "one made anew shows it too", lambda: shelf.device().get("limitBytes") == int(less)
        )


async def test_an_older_budget_never_replaces_a_newer_one(
    plane: ControlPlane, account: Path, namespace: str
) -> None:
    """As that of an operator which has read the pod, and leads no more when it writes."""
    kubectl = partial(plane.kubectl, f"--namespace={namespace}")
    await until("pods can be made", lambda: "default" in kubectl("get", "serviceaccounts"))
    kubectl("run", "agent", "--image=none", "--annotations=shoal.dev/budget=1")
    here = f"--namespace={namespace}"
    metadata = plane.access.get("pod", "agent", here)["metadata"]
    telemetry = Telemetry(asyncio.get_running_loop().time)
    api = Api(await log_in(account), telemetry, namespace=namespace)
    nothing: Any = None  # no other part is asked
    actions = Actions(api, nothing, nothing, nothing, nothing, nothing, leads=lambda: True)
    old = TellBudget(
        pod="agent", uid=metadata["uid"], version=metadata["resourceVersion"], budget_bytes=2
    )
    try:
        kubectl("annotate", "pod", "agent", "shoal.dev/budget=3", "--overwrite")
        assert not await actions.tell(namespace, old)
        metadata = plane.access.get("pod", "agent", here)["metadata"]
        assert metadata["annotations"]["shoal.dev/budget"] == "3"
        assert await actions.tell(namespace, replace(old, version=metadata["resourceVersion"]))
    finally:
        await api.close()
    metadata = plane.access.get("pod", "agent", here)["metadata"]
    assert metadata["annotations"]["shoal.dev/budget"] == "2"


async def test_where_pods_are_not_resized_an_edited_budget_replaces_them_and_says_why(
    without_resizing: None, shelf_and_device: tuple[Shelf, ScriptedDevice]
) -> None:
    shelf, device = shelf_and_device
    async with connected(device):
        first = shelf.pod()["metadata"]["uid"]
        shelf.apply_pool("160Mi")

        def is_another() -> bool:
            pod = shelf.pod()
            return bool(pod) and pod["metadata"]["uid"] != first

        await until("there is another pod", is_another)
        assert shelf.told() == 160 * MIB
        assert shelf.memory()[0] == str((96 + 160) * MIB)
        await until("it is said why", lambda: bool(shelf.events("ReplacingAgents")))
        (event,) = shelf.events("ReplacingAgents")
        assert event["message"].startswith("pods are replaced, for they are not resized: ")
        assert 'cannot patch resource "pods/resize"' in event["message"]


async def test_where_pods_are_not_resized_a_limit_stays_and_the_pool_is_none_the_worse(
    without_resizing: None, shelf_and_device: tuple[Shelf, ScriptedDevice], running: Operators
) -> None:
    """As in a cluster that is too old for it: every request for it is refused."""
    shelf, device = shelf_and_device
    log = running.latest.log
    async with connected(device):
        refused = "memory limits stay as they are"
        await until("it was tried", lambda: refused in log.read_text())
        await until(
            "the Device shows its limit", lambda: shelf.device().get("limitBytes") == int(ALLOWED)
        )
        assert shelf.memory() == (ALLOWED, ALLOWED)
        conditions = shelf.all("devicepools")[0]["status"]["conditions"]
        assert "NotApplied" not in {each["reason"] for each in conditions}
