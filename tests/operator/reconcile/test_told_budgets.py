"""A budget that is edited is adopted by the agents that run: their pods stay, and no limit is ever
smaller than what an agent may have. Where the cluster does not resize pods they are replaced."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconcile.rules import decide
from reconcile.test_device_pool import node, snapshot, view
from reconcile.test_placement import device
from reconcile.values import MIB, SETTINGS, condition, pool
from shoal_api.kinds import DevicePool
from shoal_operator.reconcile import deciding
from shoal_operator.reconcile.agent_pods import AgentPod
from shoal_operator.reconcile.agents import agent_sets, selected_nodes
from shoal_operator.reconcile.decision import Applied, Decision
from shoal_operator.reconcile.snapshot import DevicePoolSnapshot, DeviceState, Workload
from shoal_protocol.units import Bytes

FLOOR = 45 * MIB
COUNTED = 48 * MIB
"""What is counted for a floor of 45 MiB."""
NODES = ("n1", "n2", "n3")
SIZES = st.integers(1, 8).map(lambda each: each * 64 * MIB)


def shelf(size: int) -> DevicePool:
    return pool(budget={"memory": str(size)})


@dataclass
class Pod:
    """An agent's pod: what it was told, what its kubelet has done of that, and what its agent has
    adopted. `made` counts how often it was made anew."""

    told: int
    limit: int
    in_force: int
    file: int
    has: int
    version: int = 1
    made: int = 1

    def deliver(self) -> None:
        """The kubelet writes the budget where the agent reads it."""
        self.file = self.told

    def resize(self) -> None:
        """The kubelet sets the limit, but not below what is in use."""
        if self.limit >= FLOOR + self.has:
            self.in_force = self.limit

    def adopt(self) -> None:
        """As agents do: no more than the limit leaves."""
        self.has = min(self.file, self.in_force - FLOOR)


class Cluster:
    """A pool of three nodes whose controllers and kubelets do one thing when they are asked to."""

    def __init__(self, size: int, of: DevicePool | None = None) -> None:
        self.pool = of or shelf(size)
        self.not_resized = ""
        self.pods: dict[str, Pod] = {}
        self.sets: dict[str, Workload] = {}
        self.stays: dict[str, str] = {}
        self.nodes = tuple(node(name) for name in NODES)
        for each in agent_sets(self.pool, selected_nodes(self.pool, self.nodes), SETTINGS):
            self.sets[each.name] = Workload(
                name=each.name,
                wanted=len(each.nodes),
                ready=len(each.nodes),
                current=True,
                updated=len(each.nodes),
                template=each.template,
                budget_bytes=each.budget_bytes,
            )
            for name in each.nodes:
                limit = SETTINGS.agent_floor + each.budget_bytes
                sizes = (each.budget_bytes, limit, limit, each.budget_bytes, each.budget_bytes)
                self.pods[name] = Pod(*sizes)
                self.stays[name] = each.name

    def seen(self, **more: object) -> DevicePoolSnapshot:
        devices = (
            replace(device(name, budget=pod.has), floor_bytes=Bytes(FLOOR))
            for name, pod in self.pods.items()
        )
        pods = tuple(
            AgentPod(
                name=f"agent-{name}",
                uid=f"uid-{name}-{each.made}",
                version=str(each.version),
                node=name,
                agents=self.stays[name],
                budget_bytes=Bytes(each.told),
                limit_bytes=Bytes(each.limit),
                limit_in_force_bytes=Bytes(each.in_force),
            )
            for name, each in self.pods.items()
        )
        values: dict[str, object] = {
            "nodes": self.nodes,
            "agents": tuple(self.sets.values()),
            "view": view(*devices),
            "pods": pods,
            "not_resized": self.not_resized,
            **more,
        }
        return snapshot(self.pool, **values)

    def reconcile(self, *, refuse: bool = False) -> Decision:
        """What the operator decides, done; a cluster that is too old refuses to resize."""
        decision = decide(self.seen())
        for made in decision.children:
            if made["kind"] == "DaemonSet":
                self._apply(made)
        for told in decision.budgets:
            pod = self.pods[told.pod.removeprefix("agent-")]
            assert told.version == str(pod.version)
            pod.told = told.budget_bytes
            pod.version += 1
        for each in decision.resizes:
            if refuse:
                self.not_resized = "the server could not find the requested resource"
                break
            self.pods[each.pod.removeprefix("agent-")].limit = each.memory_bytes
        return decision

    def _apply(self, made: Mapping[str, Any]) -> None:
        metadata, spec = made["metadata"], made["spec"]
        known = self.sets[metadata["name"]]
        strategy = spec["updateStrategy"]["type"]
        annotations = metadata["annotations"]
        now = replace(
            known,
            template=annotations["shoal.dev/template"],
            budget_bytes=Bytes(int(annotations["shoal.dev/budget"])),
            in_place=strategy == "OnDelete",
        )
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert int(limits["memory"]) == SETTINGS.agent_floor + now.budget_bytes
        assert spec["template"]["metadata"]["annotations"]["shoal.dev/budget"] == str(
            now.budget_bytes
        ), "pods to come have the newest"
        if not now.in_place and (known.in_place or now != known):
            now = replace(now, current=False, updated=0)
        self.sets[known.name] = now

    def replace_pods(self) -> None:
        """What the controller of DaemonSets does in the end, where pods are not to stay."""
        for name, pod in self.pods.items():
            workload = self.sets[self.stays[name]]
            if not workload.in_place and not workload.current:
                size, limit = workload.budget_bytes, SETTINGS.agent_floor + workload.budget_bytes
                self.pods[name] = Pod(size, limit, limit, size, size, made=pod.made + 1)
        self.sets = {
            name: each if each.in_place else replace(each, current=True, updated=each.wanted)
            for name, each in self.sets.items()
        }

    def settle(self, *, refuse: bool = False) -> Decision:
        for _ in range(12):
            decision = self.reconcile(refuse=refuse)
            self.replace_pods()
            for pod in self.pods.values():
                for step in (pod.deliver, pod.resize, pod.adopt):
                    step()
        return decision


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whoever_is_late_no_limit_is_too_small_and_the_last_budget_is_adopted_in_place(
    data: st.DataObject,
) -> None:
    cluster = Cluster(data.draw(SIZES))
    for size in data.draw(st.lists(SIZES, min_size=1, max_size=4)):
        cluster.pool = shelf(size)
        for _ in range(data.draw(st.integers(1, 10))):
            name = data.draw(st.sampled_from(NODES))
            pod = cluster.pods[name]
            steps = ("reconcile", "deliver", "resize", "adopt")
            step = data.draw(st.sampled_from(steps))
            getattr(cluster if step == "reconcile" else pod, step)()
            for each in cluster.pods.values():
                assert each.in_force >= FLOOR + each.has
    decision = cluster.settle()
    for pod in cluster.pods.values():
        assert (pod.has, pod.told, pod.made) == (size, size, 1)
        assert pod.limit == pod.in_force == COUNTED + size
    assert not decision.resizes
    assert not decision.budgets
    assert condition(decision.status, "AgentsReady").status.value == "True"


@pytest.mark.parametrize("percent", [(30, 50), (50, 30)])
def test_a_share_that_is_edited_is_adopted_in_place_on_every_node(percent: tuple[int, int]) -> None:
    before, after = (pool(budget={"percent": each}) for each in percent)
    cluster = Cluster(0, before)
    cluster.pool = after
    cluster.settle()
    wanted = {each.budget_bytes for each in agent_sets(after, cluster.nodes, SETTINGS)}
    assert {pod.has for pod in cluster.pods.values()} == wanted
    assert {pod.made for pod in cluster.pods.values()} == {1}


def test_more_is_told_when_the_limit_has_room_and_less_before_it_is_lowered() -> None:
    cluster = Cluster(64 * MIB)
    cluster.settle()
    cluster.pool = shelf(128 * MIB)
    cluster.reconcile()
    decision = cluster.reconcile()
    assert {each.memory_bytes for each in decision.resizes} == {COUNTED + 128 * MIB}
    assert not decision.budgets
    for pod in cluster.pods.values():
        pod.resize()
    assert {each.budget_bytes for each in cluster.reconcile().budgets} == {128 * MIB}
    cluster.settle()
    cluster.pool = shelf(64 * MIB)
    cluster.reconcile()
    decision = cluster.reconcile()
    assert {each.budget_bytes for each in decision.budgets} == {64 * MIB}
    assert not decision.resizes
    assert not cluster.reconcile().resizes, "they were told, and have not said that they follow"
    for pod in cluster.pods.values():
        pod.deliver()
        pod.adopt()
    assert {each.memory_bytes for each in cluster.reconcile().resizes} == {COUNTED + 64 * MIB}


def test_an_agent_that_says_it_has_more_gets_no_larger_limit() -> None:
    cluster = Cluster(64 * MIB)
    cluster.pool = shelf(32 * MIB)
    cluster.settle()
    for pod in cluster.pods.values():
        pod.has = 1 << 40
    assert not cluster.reconcile().resizes


def test_a_pool_waits_until_all_have_adopted_a_budget_and_says_how_many_have() -> None:
    cluster = Cluster(64 * MIB)
    cluster.settle()
    cluster.pool = shelf(32 * MIB)
    for _ in range(2):
        status = cluster.reconcile().status
        ready = condition(status, "Ready")
        assert (ready.status.value, ready.reason) == ("False", "Updating")
        assert ready.message == "3 of 3 agents connected, 0 of 3 updated"
    cluster.pods["n2"].deliver()
    cluster.pods["n2"].adopt()
    decision = cluster.reconcile()
    assert condition(decision.status, "Ready").message.endswith("1 of 3 updated")
    decision = cluster.settle()
    assert condition(decision.status, "Ready").status.value == "True"


@pytest.mark.parametrize("size", [32 * MIB, 128 * MIB])
def test_where_pods_are_not_resized_they_are_replaced_and_a_condition_says_why(size: int) -> None:
    cluster = Cluster(64 * MIB)
    cluster.pool = shelf(size)
    said = []
    for _ in range(12):
        decision = cluster.reconcile(refuse=True)
        said.append(condition(decision.status, "AgentsReady").message)
        for pod in cluster.pods.values():
            pod.deliver()
            pod.adopt()
        if not any(each.in_place for each in cluster.sets.values()):
            break
    assert "pods are replaced, for they are not resized: the server could not find" in said[-1]
    cluster.settle(refuse=True)
    assert {(pod.has, pod.made) for pod in cluster.pods.values()} == {(size, 2)}
    cluster.settle(refuse=True)
    assert {pod.made for pod in cluster.pods.values()} == {2}, "once is enough"


def test_what_was_refused_before_an_edit_says_nothing_of_it() -> None:
    """A limit was not lowered; that one may be raised all the same."""
    cluster = Cluster(64 * MIB)
    cluster.pool = shelf(256 * MIB)
    cluster.reconcile()
    seen, why = cluster.seen(), "memory limits cannot be decreased"
    generation = cluster.pool.generation
    for of, expected in ((generation - 1, "OnDelete"), (generation, "RollingUpdate")):
        decision = deciding.decide(seen, Applied(generation=of, not_resized=why))
        (made,) = (each for each in decision.children if each["kind"] == "DaemonSet")
        assert _strategy(made) == expected


def test_a_limit_that_cannot_follow_a_floor_replaces_nobody() -> None:
    """The cluster is too old for it, and no budget was edited."""
    cluster = Cluster(64 * MIB)
    cluster.settle(refuse=True)
    assert cluster.not_resized
    assert {pod.made for pod in cluster.pods.values()} == {1}
    assert cluster.reconcile(refuse=True).resizes, "it is tried again"


def test_sets_of_their_own_are_replaced_one_after_the_other_where_pods_are_not_resized() -> None:
    cluster = Cluster(0, pool(budget={"percent": 30}))
    cluster.pool = pool(budget={"percent": 50})
    cluster.reconcile()
    cluster.reconcile(refuse=True)
    turns = []
    for _ in range(8):
        cluster.reconcile(refuse=True)
        turns.append([each for each in cluster.sets.values() if not each.current])
        assert len(turns[-1]) <= 1
        cluster.replace_pods()
    assert {pod.made for pod in cluster.pods.values()} == {2}


def test_what_a_node_says_is_impossible_is_refused_as_well_and_what_waits_is_said() -> None:
    cluster = Cluster(64 * MIB)
    cluster.settle()
    cluster.pool = shelf(128 * MIB)
    for _ in range(2):
        cluster.reconcile()
    seen = cluster.seen()
    first, *others = seen.pods
    waiting = replace(first, deferred="Deferred: Node didn't have enough resource: memory")
    decision = decide(replace(seen, pods=(waiting, *others)))
    message = condition(decision.status, "AgentsReady").message
    assert message.endswith("0 of 3 updated; pod agent-n1 waits: " + waiting.deferred)
    (made,) = (each for each in decision.children if each["kind"] == "DaemonSet")
    assert _strategy(made) == "OnDelete"
    refused = replace(first, infeasible="Infeasible: Node didn't have enough capacity: memory")
    decision = decide(replace(seen, pods=(refused, *others)))
    message = condition(decision.status, "AgentsReady").message
    assert "pods are replaced, for they are not resized: Infeasible" in message
    (made,) = (each for each in decision.children if each["kind"] == "DaemonSet")
    assert _strategy(made) == "RollingUpdate"


def test_what_else_is_edited_still_replaces_pods_after_a_budget_was_adopted() -> None:
    cluster = Cluster(64 * MIB)
    cluster.pool = shelf(128 * MIB)
    cluster.settle()
    assert {each.in_place for each in cluster.sets.values()} == {True}
    cluster.pool = pool(budget={"memory": "128Mi"}, cache={"size": "2Gi"})
    cluster.settle()
    assert {each.in_place for each in cluster.sets.values()} == {False}
    assert {(pod.made, pod.has) for pod in cluster.pods.values()} == {(2, 128 * MIB)}


def test_a_budget_that_is_edited_while_pods_are_replaced_comes_with_them() -> None:
    cluster = Cluster(64 * MIB)
    cluster.pool = pool(budget={"memory": "64Mi"}, cache={"size": "2Gi"})
    cluster.reconcile()
    cluster.pool = pool(budget={"memory": "32Mi"}, cache={"size": "2Gi"})
    cluster.reconcile()
    assert {each.in_place for each in cluster.sets.values()} == {False}
    cluster.settle()
    assert {(pod.made, pod.has) for pod in cluster.pods.values()} == {(2, 32 * MIB)}


def test_an_agent_that_is_away_is_told_less_at_once_and_more_when_it_is_back() -> None:
    cluster = Cluster(64 * MIB)
    cluster.settle()
    for size, told in ((32 * MIB, NODES), (128 * MIB, ("n2", "n3"))):
        cluster.pool = shelf(size)
        cluster.reconcile()
        for pod in cluster.pods.values():
            pod.in_force = pod.limit = COUNTED + 256 * MIB
        away = replace(device("n1", DeviceState.LOST), floor_bytes=Bytes(FLOOR))
        there = (replace(device(each), floor_bytes=Bytes(FLOOR)) for each in ("n2", "n3"))
        decision = decide(cluster.seen(view=view(away, *there)))
        assert {each.pod.removeprefix("agent-") for each in decision.budgets} == set(told)


def _strategy(made: Mapping[str, Any]) -> str:
    return str(made["spec"]["updateStrategy"]["type"])
