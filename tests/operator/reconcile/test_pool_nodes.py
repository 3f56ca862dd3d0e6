"""Which nodes a pool has, what they are called, and where its pods run and are dialled."""

from dataclasses import replace
from typing import Any

import pytest

from reconcile.rules import COORDINATOR, name_of, pods_in
from reconcile.test_device_pool import children, node, see, settings, snapshot, view
from reconcile.test_placement import device
from reconcile.values import NOW, SETTINGS, condition, pool, word
from shoal_agent.transport.addresses import advertised
from shoal_api.fields import Condition, ConditionStatus, Metadata, Reference
from shoal_api.kinds import Device, DevicePool
from shoal_api.kinds.device import DeviceSpec
from shoal_api.kinds.device_pool import DevicePoolStatus
from shoal_operator.reconcile.agents import agent_sets
from shoal_operator.reconcile.device_pool import is_awaited
from shoal_operator.reconcile.names import (
    agents_name,
    device_object_name,
    distinct_device_name,
)
from shoal_operator.reconcile.settings import Place
from shoal_operator.reconcile.snapshot import Unreachable, Workload

OF_SHELF = DeviceSpec(pool_ref=Reference(name="shelf"))


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
def test_an_agent_is_dialled_at_its_pods_address_of_either_family(address: str) -> None:
    (agents,) = children(see(), "DaemonSet").values()
    (spec,) = pods_in(agents)
    containers = spec["containers"]
    assert isinstance(containers, list)
    words = containers[0]["command"]
    told = words[words.index("--advertise") + 1].replace("$(POD_IP)", address)
    host = f"[{address}]" if ":" in address else address
    assert advertised(told, 7401) == f"{host}:7401"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("shoal-worker", "the name shoal-worker is kept for Shoal itself"),
        ("n" * 64, "its name has 64 characters, and a device's at most 63"),
    ],
)
def test_a_node_whose_name_no_device_may_have_is_told_why(name: str, why: str) -> None:
    status = see(nodes=(node("n1"), node(name)), view=view(device("n1"))).status
    assert condition(status, "AgentsReady").message == (
        f"1 of 2 agents connected; node {name} cannot be a device: {why}"
    )


def test_a_selector_that_matches_nothing_says_what_to_do() -> None:
    status = see(nodes=(node("n1", labels={}),), view=view()).status
    assert condition(status, "Ready").message == (
        "no node matches {shoal.dev/pool: shelf}; kubectl label node NAME shoal.dev/pool=shelf"
    )
    tainted = node("n1", taints=(("dedicated", "edge", "NoSchedule"),))
    status = see(nodes=(tainted,), view=view()).status
    assert "dedicated=edge:NoSchedule" in condition(status, "Ready").message
    tolerant = pool(tolerations=[{"key": "dedicated", "operator": "Exists"}])
    assert word(see(tolerant, nodes=(tainted,), view=view(device("n1"))).status, "Ready") == (
        "True Ready"
    )
    cordoned = node("n1", taints=(("node.kubernetes.io/not-ready", "", "NoExecute"),))
    assert word(see(nodes=(cordoned,), view=view(device("n1"))).status, "Ready") == "True Ready"


def test_nodes_with_dots_have_devices_with_names_of_their_own() -> None:
    names = {device_object_name("shelf", name) for name in ("a.b", "a-b", "a.b.c", "x" * 63)}
    assert len(names) == 4
    assert all(len(name) <= 63 and "." not in name for name in names)


def test_a_device_whose_name_another_pools_device_has_gets_one_of_its_own_and_keeps_it() -> None:
    plain, others = ["shelf-n1", "shelf-n2"], frozenset({"shelf-n1"})

    def told(*named: str, taken: frozenset[str] = frozenset()) -> list[str]:
        """What objects are applied and removed where there are these already."""
        there = tuple(Device(metadata=Metadata(name=name), spec=OF_SHELF) for name in named)
        decision = see(devices=there, taken_names=taken)
        assert not [each for each in decision.removals if each.kind == "Device"]
        return [name_of(each.device) for each in decision.devices]

    assert told() == plain
    first, second = told(taken=others)
    assert first.startswith("shelf-n1-")
    assert second == "shelf-n2"
    assert told(first, second, taken=others) == [first, second]
    assert told(first, second) == [first, second], "the other pool is gone"
    assert told(*plain, taken=others) == plain, "it was there first"


def test_agents_whose_name_another_pools_agents_have_get_one_of_their_own_and_keep_it() -> None:
    """`shelf` with a node `agent-pi` and `shelf-agent` with `pi` would share one name, and
    Kubernetes refuses the second pool's, whose pods are others."""
    share = pool(budget={"percent": 50})
    nodes = (node("agent-pi"), node("n2"))
    plain = [agents_name("shelf", each.name) for each in nodes]
    assert plain[0] == agents_name("shelf-agent", "pi")

    def named(of: DevicePool, *there: str, taken: tuple[str, ...] = ()) -> list[str]:
        sets = agent_sets(of, nodes, SETTINGS, [workload(each) for each in there], (), taken)
        return [each.name for each in sets]

    def workload(name: str) -> Workload:
        return Workload(name=name, wanted=1, ready=1, current=True)

    assert named(share) == plain
    first, second = named(share, taken=(plain[0],))
    assert first not in plain
    assert second == plain[1]
    assert named(share, first, second) == [first, second], "the other pool is gone"
    assert named(share, *plain, taken=(plain[0],)) == plain, "it was there first"
    (together,) = named(pool(), taken=("shelf-agent",))
    assert together.startswith("shelf-agent-")
    assert named(pool(), together) == [together]


def test_a_pool_is_given_the_agents_names_that_are_left() -> None:
    share = pool(budget={"percent": 50})
    taken = frozenset({agents_name("shelf", "n1")})
    decision = see(share, agents=(), taken_sets=taken)
    names = set(children(decision, "DaemonSet"))
    assert not names & taken
    assert agents_name("shelf", "n2") in names


def test_the_names_of_devices_of_pools_that_could_have_one_name_differ() -> None:
    pairs = (("lab", "edge-pi-4"), ("lab-edge", "pi-4"))
    assert len({device_object_name(*pair) for pair in pairs}) == 1
    assert len({distinct_device_name(*pair) for pair in pairs}) == 2


def test_the_coordinators_pod_is_where_the_installation_says() -> None:
    place = Place(
        node_selector={"disk": "ssd"},
        tolerations=({"operator": "Exists"},),
        priority_class_name="high",
    )
    workload = children(see(settings=settings(coordinator_place=place)), "Deployment")
    (pod,) = pods_in(workload["shelf-coordinator"])
    assert (pod["nodeSelector"], pod["tolerations"], pod["priorityClassName"]) == (
        {"disk": "ssd"},
        [{"operator": "Exists"}],
        "high",
    )
    assert "affinity" not in pod


def test_agents_have_the_priority_class_of_the_installation_and_none_by_default() -> None:
    def classes(**more: Any) -> set[Any]:
        sets = children(see(settings=settings(**more)), "DaemonSet").values()
        return {pod.get("priorityClassName") for each in sets for pod in pods_in(each)}

    assert classes(agent_priority_class="edge") == {"edge"}
    assert classes() == {None}


@pytest.mark.parametrize(
    ("kind", "of"), [("DaemonSet", "agent_labels"), ("Deployment", "coordinator_labels")]
)
def test_pods_of_a_pool_have_the_labels_of_the_installation(kind: str, of: str) -> None:
    def labels(**given: Any) -> dict[str, Any]:
        made: Any = children(see(settings=settings(**given)), kind)
        return {name: each["spec"]["template"]["metadata"]["labels"] for name, each in made.items()}

    more = {"team": "edge", "app.kubernetes.io/component": "other"}
    own = labels()
    assert own
    assert labels(**{of: more}) == {name: {**each, "team": "edge"} for name, each in own.items()}


def replaced(of: DevicePool | None = None, **more: Any) -> bool:
    """Whether agents are given their newest template, which replaces them."""
    (agents,) = snapshot().agents
    old = replace(agents, template="older", ready=more.pop("agents_ready", agents.ready))
    return "DaemonSet" in {str(each["kind"]) for each in see(of, agents=(old,), **more).children}


def test_agents_are_not_replaced_while_their_coordinator_is() -> None:
    """Without it none of them is available, and Kubernetes would replace all at once."""
    assert replaced()
    assert not replaced(coordinator=replace(COORDINATOR, template="older"))
    assert not replaced(coordinator=replace(COORDINATOR, template=""))
    assert not replaced(coordinator=replace(COORDINATOR, current=False))
    assert not replaced(coordinator=replace(COORDINATOR, ready=0))
    assert not replaced(view=Unreachable(reason="connection refused"))


def test_agents_are_replaced_when_those_that_can_have_found_their_coordinator_again() -> None:
    def back_since(moment: str) -> DevicePool:
        ready = Condition(
            type="CoordinatorReady",
            status=ConditionStatus.TRUE,
            reason="Answers",
            last_transition_time=moment,
        )
        return replace(pool(), status=DevicePoolStatus(conditions=(ready,)))

    assert not replaced(back_since(NOW), agents_ready=0)
    assert replaced(back_since(NOW))
    assert replaced(back_since("2026-03-01T11:59:00Z"), agents_ready=0), "they fail by themselves"


def test_agents_that_nobody_can_enrol_are_not_taken_for_missing() -> None:
    status = see(agents=(), enrolment_authority="").status
    assert word(status, "AgentsReady") == "False WaitingForCertificates"
    assert (
        "the operator has no authority to enrol agents with" in condition(status, "Ready").message
    )


@pytest.mark.parametrize(
    ("status", "now", "awaited"),
    [
        (ConditionStatus.FALSE, "2026-03-01T12:04:59Z", True),
        (ConditionStatus.FALSE, "2026-03-01T12:05:00Z", False),
        (ConditionStatus.TRUE, NOW, False),
    ],
)
def test_a_pool_is_awaited_for_five_minutes_after_it_was_ready(
    status: ConditionStatus, now: str, awaited: bool
) -> None:
    ready = Condition(type="Ready", status=status, reason="X", last_transition_time=NOW)
    assert is_awaited(replace(pool(), status=DevicePoolStatus(conditions=(ready,))), now) is awaited
    assert not is_awaited(None, now)
