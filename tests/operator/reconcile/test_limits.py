"""Devices as they are reported: memory limits of pods follow floors, links are shown, and
whether one has left in order."""

from dataclasses import replace

import pytest

from reconcile.rules import decide
from reconcile.test_device_pool import snapshot, view
from reconcile.test_placement import device
from reconcile.values import MIB, NOW, SETTINGS, word
from shoal_api.kinds import Device
from shoal_api.schema import parse
from shoal_operator.reconcile.agent_pods import AgentPod
from shoal_operator.reconcile.decision import Resize
from shoal_operator.reconcile.limits import GRACE_SECONDS
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    DevicePoolSnapshot,
    DeviceState,
    Unreachable,
)
from shoal_operator.reconcile.times import as_time, instant
from shoal_protocol.speeds import Link
from shoal_protocol.units import Bytes

BUDGET = 64 * MIB
ALLOWED = SETTINGS.agent_floor + BUDGET


def pod(node: str, limit: int = ALLOWED, budget: int = BUDGET) -> AgentPod:
    return AgentPod(
        name=f"shelf-agent-{node}",
        uid=f"uid-{node}",
        version="1",
        node=node,
        agents="shelf-agent",
        budget_bytes=Bytes(budget),
        limit_bytes=Bytes(limit),
        limit_in_force_bytes=Bytes(limit),
    )


def measured(name: str, floor: int, state: DeviceState = DeviceState.READY) -> ConnectedDevice:
    return replace(device(name, state), floor_bytes=Bytes(floor))


def limits(of: DevicePoolSnapshot) -> dict[str, int]:
    """What is resized, by pod."""
    return {each.pod: each.memory_bytes for each in decide(of).resizes}


def known(of: DevicePoolSnapshot) -> tuple[Device, ...]:
    """The Devices as they are known once the decision about them was carried out."""
    found = []
    for child in decide(of).devices:
        parsed = parse(Device, {**child.device})
        assert isinstance(parsed, Device)
        found.append(replace(parsed, status=child.status))
    return tuple(found)


def test_each_pod_has_the_floor_of_its_own_agent_and_the_budget_it_started_with() -> None:
    pods = (pod("n1"), pod("n2", budget=2 * BUDGET))
    seen = view(measured("n1", 45 * MIB), measured("n2", 51 * MIB))
    assert decide(snapshot(view=seen, pods=pods)).resizes == (
        Resize(
            pod="shelf-agent-n1", uid="uid-n1", container="agent", memory_bytes=48 * MIB + BUDGET
        ),
        Resize(
            pod="shelf-agent-n2",
            uid="uid-n2",
            container="agent",
            memory_bytes=56 * MIB + 2 * BUDGET,
        ),
    )


def test_a_pod_that_has_its_limit_is_left_alone_though_its_floor_moves_a_little() -> None:
    pods = (pod("n1", 48 * MIB + BUDGET),)
    for floor in (43 * MIB, 45 * MIB, 46 * MIB):
        assert limits(snapshot(view=view(measured("n1", floor)), pods=pods)) == {}


def test_a_limit_always_leaves_the_budget_and_two_mebibytes_and_never_six() -> None:
    for floor in range(40 * MIB, 60 * MIB, 333_333):
        found = limits(snapshot(view=view(measured("n1", floor)), pods=(pod("n1", 1),)))
        assert 2 * MIB <= found["shelf-agent-n1"] - BUDGET - floor < 6 * MIB


@pytest.mark.parametrize("floor", [2 * SETTINGS.agent_floor, 500 << 30, 1 << 50])
def test_an_agent_does_not_talk_its_own_limit_away(floor: int) -> None:
    """The floor is the agent's own word, and the limit is what keeps it from the node's memory."""
    found = limits(snapshot(view=view(measured("n1", floor)), pods=(pod("n1"),)))
    assert found == {"shelf-agent-n1": 2 * SETTINGS.agent_floor + BUDGET}


def test_a_floor_that_is_a_little_above_the_allowance_has_its_room() -> None:
    floor = SETTINGS.agent_floor + 10 * MIB
    found = limits(snapshot(view=view(measured("n1", floor)), pods=(pod("n1"),)))
    assert found["shelf-agent-n1"] >= floor + BUDGET


def test_the_template_of_the_pods_stays_whatever_was_measured() -> None:
    first, later = (
        decide(snapshot(view=view(measured("n1", floor)), pods=(pod("n1"),)))
        for floor in (45 * MIB, 60 * MIB)
    )
    assert first.children == later.children


@pytest.mark.parametrize(
    "seen",
    [
        Unreachable(reason="connection refused"),
        view(),
        view(measured("n1", 45 * MIB, DeviceState.LOST)),
        view(measured("n1", 0)),
    ],
    ids=["unreachable", "unknown", "lost", "unmeasured"],
)
def test_a_limit_stays_where_nothing_is_known_of_the_agent(seen: object) -> None:
    assert limits(snapshot(view=seen, pods=(pod("n1", 48 * MIB + BUDGET),))) == {}


def test_an_agent_that_stays_away_gets_the_allowance_to_start_with() -> None:
    """It may need more than the time before, and takes no work where the limit is too low."""
    lowered = (pod("n1", 48 * MIB + BUDGET),)
    there = snapshot(view=view(measured("n1", 45 * MIB)), pods=lowered)
    lost = view(measured("n1", 45 * MIB, DeviceState.LOST))
    away = replace(there, view=lost, devices=known(there))
    away = replace(away, devices=known(away))
    assert limits(away) == {}
    later = as_time(instant(NOW) + GRACE_SECONDS)
    assert limits(replace(away, now=later)) == {"shelf-agent-n1": ALLOWED}
    assert limits(replace(away, now=later, view=view())) == {"shelf-agent-n1": ALLOWED}


def test_a_device_shows_the_limit_that_is_in_force() -> None:
    resizing = replace(pod("n1", 48 * MIB + BUDGET), limit_in_force_bytes=Bytes(ALLOWED))
    seen = view(measured("n1", 45 * MIB))
    (shown,) = known(snapshot(view=seen, pods=(resizing,)))
    assert shown.status is not None
    assert shown.status.limit_bytes == ALLOWED
    (later,) = known(snapshot(view=seen, devices=(shown,)))
    assert later.status is not None
    assert later.status.limit_bytes == ALLOWED, "pods are not read each time"


def test_links_to_other_devices_are_shown_and_the_coordinator_is_none_of_them() -> None:
    ends = (("", Link(bytes_per_second=1e6)), ("n2", Link(bytes_per_second=2e6)))
    link = Link(bytes_per_second=2e6, handling_seconds=8e-4, peers=ends)
    seen = replace(device("n1", DeviceState.READY), link=link)
    (child,) = decide(snapshot(view=view(seen))).devices
    assert child.status.link is not None
    assert [each.name for each in child.status.link.peers] == ["n2"]
    assert child.status.link.handling_seconds == 8e-4


def test_a_device_that_left_in_order_is_not_called_lost() -> None:
    of, lost = known(snapshot()), device("n2", DeviceState.LOST)
    for gone, said in ((lost, "False Lost"), (replace(lost, has_left=True), "False Left")):
        _, second = known(snapshot(devices=of, view=view(device("n1"), gone)))
        assert second.status is not None
        assert word(second.status, "Ready") == said
