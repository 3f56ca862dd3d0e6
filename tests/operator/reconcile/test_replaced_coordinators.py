"""What the coordinator before has said is not taken for the word of the one that follows it."""

from dataclasses import replace

from reconcile.rules import COORDINATOR, decide
from reconcile.test_device_pool import shown, snapshot, view
from reconcile.test_placement import device
from reconcile.values import word
from shoal_api.kinds.device_pool import DevicePoolStatus
from shoal_operator.reconcile.device_pool import ASKED_SECONDS, REQUEUE_SECONDS
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DevicePoolSnapshot,
    Workload,
)

ALL = (device("n1"), device("n2"))
OLD = replace(COORDINATOR, current=False, behind_at=7.0)
GOES = replace(COORDINATOR, ready=0, behind_at=8.0)
NEW = replace(COORDINATOR, behind_at=9.0)


def said(begun: float, *devices: ConnectedDevice) -> CoordinatorView:
    return replace(view(*devices), begun=begun)


class Told:
    """A pool, what becomes of it, and the Events about that."""

    def __init__(self) -> None:
        self.seen: DevicePoolSnapshot = snapshot()
        self.events: list[str] = []
        self.requeue_seconds = 0.0

    def next(self, coordinator: Workload, of: CoordinatorView) -> str:
        """Ready, of such a Deployment and this view."""
        self.seen = replace(self.seen, coordinator=coordinator, view=of)
        decision = decide(self.seen)
        assert isinstance(decision.status, DevicePoolStatus)
        self.seen = replace(self.seen, pool=replace(self.seen.pool, status=decision.status))
        self.events += [note.reason for note in decision.notes]
        self.requeue_seconds = decision.requeue_seconds or 0.0
        return word(decision.status, "Ready")


def test_a_pool_is_ready_once_when_its_coordinator_was_replaced() -> None:
    pool = Told()
    assert pool.next(COORDINATOR, said(1.0, *ALL)) == "True Ready"
    assert pool.next(OLD, said(6.0, *ALL)) == "False Updating"
    assert pool.next(GOES, said(6.0, *ALL)) == "False Starting"
    assert pool.next(NEW, said(6.0, *ALL)) == "False CoordinatorUnreachable", "by the one before"
    assert pool.requeue_seconds == ASKED_SECONDS, "the next answer may say the same"
    assert pool.next(NEW, said(10.0, device("n1"))) == "False AgentsMissing"
    assert pool.next(NEW, said(12.0, *ALL)) == "True Ready"
    assert pool.requeue_seconds == REQUEUE_SECONDS
    assert pool.events == ["PoolReady", "Updating", "PoolReady"]


def test_who_is_connected_to_a_coordinator_that_was_not_asked_is_not_known() -> None:
    known = shown(decide(snapshot()))
    decision = decide(snapshot(coordinator=NEW, view=said(6.0, *ALL), devices=known))
    assert word(decision.status, "AgentsReady") == "False CoordinatorUnreachable"
    assert {word(child.status, "Ready") for child in decision.devices} == {
        "Unknown CoordinatorUnreachable"
    }
