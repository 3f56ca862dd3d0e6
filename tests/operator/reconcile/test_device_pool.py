"""A pool is a coordinator, agents by size of node, certificates, closed networks, and Devices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reconcile.rules import COORDINATOR, decide, name_of, pods_in
from reconcile.test_placement import device
from reconcile.values import MIB, NAMESPACE, NOW, SETTINGS, condition, passes_its_schema, pool, word
from shoal_api.kinds import Device, DevicePool
from shoal_api.kinds.device_pool import DevicePoolStatus
from shoal_api.schema import parse
from shoal_operator.reconcile.agents import agent_sets, selected_nodes
from shoal_operator.reconcile.decision import CancelJob, Decision, RemoveJob, Terms
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DevicePoolSnapshot,
    DeviceState,
    Node,
    Run,
    RunState,
    Unreachable,
    Workload,
)
from shoal_operator.reconcile.volumes import Claim
from shoal_protocol.choices import Residency
from shoal_protocol.units import Bytes

SECRETS = frozenset({"shelf-ca", "shelf-coordinator-tls", "shelf-worker-tls"})
LATER = "2026-03-01T12:00:30Z"


def node(name: str, memory: int = 1024 * MIB, **more: object) -> Node:
    values: dict[str, object] = {"labels": {"shoal.dev/pool": "shelf"}, "ready": True, **more}
    return Node(name=name, allocatable_memory=Bytes(memory), **values)  # type: ignore[arg-type]


def run(job: str, state: RunState) -> Run:
    return Run(
        job=job,
        state=state,
        message="",
        plan=1,
        terms=Terms(),
        items=1,
        active=0,
        succeeded=0,
        failed=0,
        seconds=0.0,
        items_per_second=0.0,
        latency_p50_seconds=0.0,
        tier_hits=(0, 0, 0, 0),
    )


def view(*devices: ConnectedDevice, runs: Mapping[str, Run] | None = None) -> CoordinatorView:
    return CoordinatorView(begun=0.0, devices=devices, runs=runs or {}, fragments=frozenset())


def snapshot(of: DevicePool | None = None, **more: object) -> DevicePoolSnapshot:
    """A pool of two nodes, both connected."""
    base = DevicePoolSnapshot(
        now=NOW,
        settings=SETTINGS,
        pool=of or pool(),
        nodes=(node("n1"), node("n2")),
        secrets=SECRETS,
        coordinator=COORDINATOR,
        claim=Claim(name="shelf-coordinator", bound=True, size=Bytes(5 << 30)),
        agents=(),
        view=view(device("n1"), device("n2")),
        devices=(),
        jobs=frozenset(),
        enrolment_authority="PEM",
    )
    made = replace(base, **more)  # type: ignore[arg-type]
    return made if "agents" in more else replace(made, agents=rolled_out(made))


def rolled_out(of: DevicePoolSnapshot) -> tuple[Workload, ...]:
    """The DaemonSets that there should be, all pods ready and of the newest template."""
    return tuple(
        Workload(
            name=each.name,
            wanted=len(each.nodes),
            ready=len(each.nodes),
            current=True,
            updated=len(each.nodes),
            template=each.template,
            budget_bytes=each.budget_bytes,
        )
        for each in agent_sets(of.pool, selected_nodes(of.pool, of.nodes), of.settings)
    )


def see(of: DevicePool | None = None, **more: object) -> Decision:
    return decide(snapshot(of, **more))


def children(decision: Decision, kind: str) -> dict[str, Mapping[str, object]]:
    return {name_of(child): child for child in decision.children if child["kind"] == kind}


def settings(**more: object) -> OperatorSettings:
    return replace(SETTINGS, **more)  # type: ignore[arg-type]


def test_everything_of_a_pool_is_made_at_once() -> None:
    made = [(str(child["kind"]), name_of(child)) for child in see().children]
    assert made == [
        ("ServiceAccount", "shelf-coordinator"),
        ("PersistentVolumeClaim", "shelf-coordinator"),
        ("ConfigMap", "shelf-coordinator"),
        ("Service", "shelf-coordinator"),
        ("Deployment", "shelf-coordinator"),
        ("ServiceAccount", "shelf-agent"),
        ("ConfigMap", "shelf-trust"),
        ("DaemonSet", "shelf-agent"),
        ("NetworkPolicy", "shelf-closed"),
        ("NetworkPolicy", "shelf-coordinator"),
        ("NetworkPolicy", "shelf-agents"),
        ("NetworkPolicy", "shelf-workers"),
    ]
    assert [(each.secret, each.common_name) for each in see().certificates] == [
        ("shelf-ca", "shelf-ca"),
        ("shelf-coordinator-tls", "shelf-coordinator"),
        ("shelf-worker-tls", "shoal-worker"),
        ("shelf-viewer-tls", "shoal-viewer"),
    ]


SILENT = Unreachable(reason="connection refused")


@pytest.mark.parametrize("lacking", [{"enrolment_authority": ""}, {"view": SILENT}], ids=str)
def test_agents_wait_for_what_they_need(lacking: Any) -> None:
    """Until then their pods would only collect warnings."""
    assert children(see(agents=(), **lacking), "DaemonSet") == {}
    if "view" in lacking:
        assert children(see(**lacking), "DaemonSet"), "what exists is kept up to date"


def test_a_pool_with_all_its_devices_is_ready() -> None:
    status = see().status
    assert isinstance(status, DevicePoolStatus)
    assert word(status, "Ready") == "True Ready"
    assert status.devices is not None
    assert (status.devices.ready, status.devices.total) == (2, 2)
    assert status.budget_bytes == 128 * MIB
    assert status.coordinator_endpoint == f"shelf-coordinator.{NAMESPACE}.svc:7400"


def test_an_agents_memory_limit_is_the_floor_and_the_budget() -> None:
    (agents,) = children(see(), "DaemonSet").values()
    (spec,) = pods_in(agents)
    containers = spec["containers"]
    assert isinstance(containers, list)
    assert containers[0]["resources"]["limits"] == {"memory": str((64 + 64) * MIB)}
    assert spec["nodeSelector"] == {"shoal.dev/pool": "shelf"}


SHARED = pool(budget={"percent": 50})


def test_of_a_share_each_node_has_a_daemon_set_of_its_own_by_its_size_to_16_mebibytes() -> None:
    nodes = (
        node("a", 1024 * MIB),
        node("b", 1026 * MIB),
        node("c", 2048 * MIB),
        node("d", 60 * MIB),
    )
    stale = Workload(name="shelf-agent", wanted=0, ready=0, current=True)
    decision = see(SHARED, nodes=nodes, agents=(stale,))
    limits = []
    for made in children(decision, "DaemonSet").values():
        (spec,) = pods_in(made)
        containers = spec["containers"]
        assert isinstance(containers, list)
        limits.append(int(containers[0]["resources"]["limits"]["memory"]) // MIB - 64)
    assert limits == [512, 512, 1024]
    assert [(key.kind, key.name) for key in decision.removals] == [("DaemonSet", "shelf-agent")]
    status = decision.status
    assert isinstance(status, DevicePoolStatus)
    assert status.smallest_budget_bytes == 512 * MIB
    assert status.budget_bytes == 2048 * MIB
    assert status.devices is not None
    assert status.devices.total == 4
    assert "node d is too small" in condition(status, "AgentsReady").message


def test_a_node_that_joins_or_leaves_starts_no_other_agent_again() -> None:
    nodes = (node("a"), node("b"), node("c"))
    few = children(see(SHARED, nodes=nodes[:2]), "DaemonSet")
    more = children(see(SHARED, nodes=nodes), "DaemonSet")
    assert len(more) == len(few) + 1
    assert {name: more[name] for name in few} == few


def templates(decision: Decision) -> dict[str, object]:
    """The marks of the templates that are applied."""
    found = {}
    for name, made in children(decision, "DaemonSet").items():
        metadata = made["metadata"]
        assert isinstance(metadata, Mapping)
        found[name] = metadata["annotations"]["shoal.dev/template"]
    return found


def test_an_edit_reaches_nodes_with_sets_of_their_own_one_after_the_other() -> None:
    nodes = tuple(node(name, ready=name != "e") for name in "abcde")
    edited = replace(SHARED, spec=replace(SHARED.spec, residency=Residency.SINGLE))
    before = snapshot(SHARED, nodes=nodes)
    agents = {each.name: each for each in before.agents}
    away = next(each.name for each in agent_sets(SHARED, nodes, SETTINGS) if each.away)
    agents[away] = replace(agents[away], ready=0)
    turns = []
    while True:
        decision = see(edited, nodes=nodes, agents=tuple(agents.values()))
        new = {n: t for n, t in templates(decision).items() if t != agents[n].template}
        if not new:
            break
        turns.append(sorted(new))
        for name, mark in new.items():
            agents[name] = replace(agents[name], template=str(mark), current=False, ready=0)
        decision = see(edited, nodes=nodes, agents=tuple(agents.values()))
        assert word(decision.status, "Ready") != "True Ready"
        waiting = {n for n, t in templates(decision).items() if t != agents[n].template}
        assert not waiting, "nobody is replaced before the others are back"
        for name in new:
            if name != away:
                agents[name] = replace(agents[name], current=True, ready=1, updated=1)
    others = sorted(agents.keys() - {away})
    assert turns == [sorted([away, others[0]]), *([name] for name in others[1:])]


def test_nodes_that_are_away_take_up_nobodys_turn_in_a_shared_set() -> None:
    def unavailable(*nodes: Node) -> object:
        (made,) = children(see(nodes=nodes), "DaemonSet").values()
        spec = made["spec"]
        assert isinstance(spec, Mapping)
        return spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"]

    assert unavailable(node("a"), node("b"), node("c")) == 1
    assert unavailable(node("a"), node("b"), node("c", ready=False)) == 2
    assert unavailable(*(node(f"n{number}") for number in range(40))) == 4


def test_a_pool_is_not_ready_before_what_was_edited_runs_everywhere() -> None:
    (agents,) = snapshot().agents
    for seen in (
        replace(agents, template="older"),
        replace(agents, current=False, updated=1),
        replace(agents, current=False, updated=2),
    ):
        status = see(agents=(seen,)).status
        assert word(status, "AgentsReady") == "False Updating"
        assert word(status, "Ready") == "False Updating"
    status = see(agents=(replace(agents, current=False, updated=1),)).status
    assert condition(status, "Ready").message == "2 of 2 agents connected, 1 of 2 updated"
    old = Workload(name="shelf-coordinator", wanted=1, ready=1, current=False)
    assert word(see(coordinator=old).status, "CoordinatorReady") == "False Updating"


def test_a_share_leaves_room_for_the_agents_own_floor() -> None:
    decision = see(pool(budget={"percent": 95}), nodes=(node("a", 256 * MIB),))
    assert isinstance(decision.status, DevicePoolStatus)
    assert decision.status.budget_bytes == 192 * MIB


@pytest.mark.parametrize(
    ("more", "reason", "text"),
    [
        ({"coordinator": None}, "Creating", "is being made"),
        ({"secrets": frozenset()}, "WaitingForCertificates", "shelf-ca"),
        (
            {
                "claim": Claim(
                    name="shelf-coordinator",
                    bound=False,
                    size=Bytes(1),
                    message="no storage class is the default",
                )
            },
            "VolumePending",
            "no storage class is the default",
        ),
        (
            {
                "coordinator": Workload(
                    name="c", wanted=1, ready=0, current=True, message="image x cannot be pulled"
                )
            },
            "CoordinatorFailing",
            "image x cannot be pulled",
        ),
        (
            {"coordinator": Workload(name="c", wanted=1, ready=0, current=True)},
            "Starting",
            "starting",
        ),
        ({"view": Unreachable(reason="refused")}, "CoordinatorUnreachable", "refused"),
    ],
)
def test_a_coordinator_in_trouble_says_which(
    more: dict[str, object], reason: str, text: str
) -> None:
    status = see(**more).status  # type: ignore[arg-type]
    assert word(status, "CoordinatorReady") == f"False {reason}"
    assert text in condition(status, "Ready").message
    assert word(status, "Ready") == f"False {reason}"


def test_missing_agents_are_named() -> None:
    nodes = (node("n1"), node("n2", ready=False), node("n3"))
    silent = device("n3", DeviceState.SILENT)
    status = see(nodes=nodes, view=view(device("n1"), silent)).status
    assert condition(status, "AgentsReady").message == (
        "1 of 3 agents connected; node n2 NotReady; the agent on node n3 is silent"
    )
    (agents,) = rolled_out(snapshot(nodes=nodes))
    killed = replace(agents, ready=1, message="OOMKilled on n3")
    status = see(nodes=nodes, view=view(device("n1"), silent), agents=(killed,)).status
    assert word(status, "AgentsReady") == "False AgentsFailing"
    assert "OOMKilled on n3" in condition(status, "Ready").message


def test_a_claim_that_is_there_keeps_its_class_and_does_not_shrink() -> None:
    of = pool(coordinator={"storage": {"size": "1Gi", "storageClassName": "fast"}})
    there = Claim(name="c", bound=True, size=Bytes(5 << 30), storage_class="slow")
    (claim,) = children(see(of, claim=there), "PersistentVolumeClaim").values()
    spec = claim["spec"]
    assert isinstance(spec, Mapping)
    assert spec["storageClassName"] == "slow"
    assert spec["resources"] == {"requests": {"storage": "5Gi"}}


def test_runs_whose_job_is_gone_are_stopped_and_forgotten() -> None:
    runs = {
        "alive-1": run("alive-1", RunState.RUNNING),
        "gone-1": run("gone-1", RunState.RUNNING),
        "gone-2": run("gone-2", RunState.CANCELLED),
    }
    # "alive-1" was submitted after its files were listed.
    left = frozenset({"alive-1", "waits-1", "gone-3"})
    seen = replace(view(device("n1"), device("n2"), runs=runs), unsubmitted=left)
    decision = see(view=seen, jobs=frozenset({"alive-1", "waits-1"}))
    assert decision.calls == (
        CancelJob(pool="shelf", job="gone-1", reason="its InferenceJob was deleted"),
        RemoveJob(pool="shelf", job="gone-2"),
        RemoveJob(pool="shelf", job="gone-3"),
    )


def shown(decision: Decision) -> tuple[Device, ...]:
    """The Devices as the API server would have them."""
    made = []
    for child in decision.devices:
        parsed = parse(Device, dict(child.device))
        assert isinstance(parsed, Device)
        parsed = replace(parsed, metadata=replace(parsed.metadata, generation=1))
        made.append(replace(parsed, status=child.status))
        assert passes_its_schema(made[-1])
    return tuple(made)


def test_devices_are_told_as_the_coordinator_reports_them() -> None:
    of = shown(see(view=view(device("n1"), device("n2", DeviceState.SILENT))))
    assert [each.metadata.name for each in of] == ["shelf-n1", "shelf-n2"]
    first, second = (each.status for each in of)
    assert first is not None
    assert second is not None
    assert word(first, "Ready") == "True Connected"
    assert word(second, "Ready") == "Unknown Silent"
    assert (first.node, first.budget_bytes, first.last_seen_time) == ("n1", 24 * MIB, NOW)


def test_last_seen_of_a_device_that_is_there_moves_every_five_minutes() -> None:
    of = shown(see())
    for now, seen in (
        (LATER, NOW),
        ("2026-03-01T12:04:59Z", NOW),
        ("2026-03-01T12:05:00Z", "2026-03-01T12:05:00Z"),
    ):
        after = shown(see(devices=of, now=now))
        assert after[0].status is not None
        assert after[0].status.last_seen_time == seen


def test_a_device_stays_while_its_node_is_selected_and_goes_with_it() -> None:
    of = shown(see())
    away = see(devices=of, view=view(device("n1")))
    assert [each.metadata.name for each in shown(away)] == ["shelf-n1", "shelf-n2"]
    assert away.removals == ()
    gone = see(
        devices=of, nodes=(node("n1"),), view=view(device("n1"), device("n2", DeviceState.LOST))
    )
    assert [key.name for key in gone.removals] == ["shelf-n2"]
    assert [each.metadata.name for each in shown(gone)] == ["shelf-n1"]
    unknown = see(devices=of, nodes=(node("n1"),), view=Unreachable(reason="x"))
    assert unknown.removals == ()
    assert {word(child.status, "Ready") for child in unknown.devices} == {
        "Unknown CoordinatorUnreachable"
    }


def test_a_cache_of_a_storage_class_is_a_volume_per_pod() -> None:
    decision = see(pool(cache={"size": "2Gi", "storageClassName": "local-path"}))
    (spec,) = pods_in(children(decision, "DaemonSet")["shelf-agent"])
    volumes = spec["volumes"]
    assert isinstance(volumes, list)
    cache = next(volume for volume in volumes if volume["name"] == "cache")
    template = cache["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert template["storageClassName"] == "local-path"


def test_cert_manager_is_asked_where_it_is_there() -> None:
    decision = see(settings=settings(cert_manager=True), secrets=frozenset())
    assert decision.certificates == ()
    assert list(children(decision, "Certificate")) == [
        *("shelf-ca", "shelf-coordinator-tls", "shelf-worker-tls", "shelf-viewer-tls")
    ]
    assert list(children(decision, "Issuer")) == ["shelf-self-signed", "shelf-ca"]
    assert word(decision.status, "Ready") == "False WaitingForCertificates"
    assert condition(decision.status, "Ready").message == (
        "Secret shelf-ca is not there yet; cert-manager was asked for it"
    )


def test_what_becomes_of_a_pool_is_an_event_once() -> None:
    first = see()
    assert [note.reason for note in first.notes] == ["PoolReady"]
    assert isinstance(first.status, DevicePoolStatus)
    of = replace(pool(), status=first.status)
    assert see(of).notes == ()
    away = see(of, view=Unreachable(reason="refused"), now=LATER)
    assert isinstance(away.status, DevicePoolStatus)
    (back,) = see(replace(of, status=away.status), now="2026-03-01T13:00:00Z").notes
    assert back.reason == "PoolReady"
    assert back != first.notes[0], "it is ready once more"
    assert [note.warning for note in see(of, view=Unreachable(reason="refused")).notes] == [True]


def test_the_longest_name_still_makes_names() -> None:
    names = [name_of(child) for child in see(pool("p" * 63)).children]
    assert names
    assert max(map(len, names)) <= 63
