"""A Placement chooses where its Partition is cut, and when that is done again."""

import base64
import gzip
import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

import pytest

from fragment_pools import cut_table
from reconcile.rules import decide
from reconcile.simulation import started
from reconcile.test_partition import command_of, name_of, ready_model
from reconcile.test_placement import device
from reconcile.test_walks import check_the_end, disturb, heal, reconcile_all, settle
from reconcile.values import MIB, NOW, SETTINGS, cut_at, cuts_in, document, make, pool, word
from shoal_api.kinds import InferenceJob, Partition, Placement
from shoal_api.kinds.partition import PartitionStatus
from shoal_api.kinds.placement import PlacementStatus
from shoal_operator.reconcile.decision import Decision, Manifest
from shoal_operator.reconcile.names import document_name, table_name
from shoal_operator.reconcile.partition import read_document
from shoal_operator.reconcile.planned_cuts import cut_arguments, cuts_of, read_table
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    PartitionSnapshot,
    PlacementSnapshot,
    StoredDocument,
    Worker,
    WorkerPhase,
)
from shoal_protocol.cut_table import table_to_json
from shoal_protocol.partition import document_to_json
from shoal_protocol.speeds import Speed

LAYERS = 20
TABLE = cut_table([10**9] * LAYERS, [MIB] * LAYERS)


def fast(name: str, times: float = 1.0, budget: int = 32 * MIB) -> ConnectedDevice:
    return replace(device(name, budget=budget), speed=Speed(processors=times))


def placement(name: str = "chooser", created: str = NOW, **more: object) -> Placement:
    spec = {"partitionRef": {"name": "rec"}, "poolRef": {"name": "shelf"}, **more}
    made = make(Placement, name, spec)
    return replace(made, metadata=replace(made.metadata, creation_timestamp=created))


@dataclass
class Cluster:
    """One Partition, its Placements, a pool, and workers that the test lets succeed."""

    devices: tuple[ConnectedDevice, ...]
    placements: dict[str, Placement] = field(default_factory=lambda: {"chooser": placement()})
    partition: Partition = field(
        default_factory=lambda: make(
            Partition, "rec", {"modelRef": {"name": "rec"}, "cutting": "Planned"}
        )
    )
    objects: dict[str, Manifest] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Reconcile everything once."""
        document, table = document_name("rec"), table_name("rec")
        stored = read_document(self.objects.get(document, {}))
        known = read_table(self.objects.get(table, {}))
        decision = decide(
            PartitionSnapshot(
                now=NOW,
                settings=SETTINGS,
                partition=self.partition,
                model=ready_model(),
                workers=tuple(self.workers.values()),
                document=stored,
                table=known,
                placements=tuple(self.placements.values()),
            )
        )
        self.partition = replace(self.partition, status=cast("PartitionStatus", decision.status))
        self._carry_out(decision)
        for name, each in self.placements.items():
            decision = decide(
                PlacementSnapshot(
                    now=NOW,
                    settings=SETTINGS,
                    placement=each,
                    partition=self.partition,
                    document=read_document(self.objects.get(document, {})),
                    pool=pool(),
                    view=CoordinatorView(
                        begun=0.0, devices=self.devices, runs={}, fragments=frozenset()
                    ),
                    table=known,
                    placements=tuple(self.placements.values()),
                )
            )
            status = cast("PlacementStatus", decision.status)
            self.placements[name] = replace(each, status=status)
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        for child in decision.children:
            if child["kind"] == "Job":
                command = command_of(child)
                self.commands.append(command)
                self.workers[name_of(child)] = Worker(
                    name=name_of(child), phase=WorkerPhase.RUNNING
                )
            else:
                self.objects[name_of(child)] = child
        for key in decision.removals:
            self.workers.pop(key.name, None)
        self.notes += [note.reason for note in decision.notes]

    def finish_workers(self) -> None:
        """Each succeeds with what its command asks for; the newest is the only one."""
        (name,) = self.workers
        command = self.commands[-1]
        text = table_to_json(TABLE)
        if "--table" not in command:
            text = document_to_json(cut_at(TABLE, cuts_in(command)))
        self.workers[name] = Worker(name=name, phase=WorkerPhase.SUCCEEDED, output=text.encode())

    def settle(self) -> None:
        for _ in range(12):
            self.look()
            if any(each.phase is WorkerPhase.RUNNING for each in self.workers.values()):
                self.finish_workers()

    def status(self, name: str = "chooser") -> PlacementStatus:
        status = self.placements[name].status
        assert status is not None
        return status

    def cut_status(self) -> PartitionStatus:
        status = self.partition.status
        assert status is not None
        return status

    def cuts(self) -> tuple[str, ...]:
        cut = self.status().cut
        assert cut is not None
        return cut.cuts


def test_the_placement_chooses_the_cut_and_the_partition_is_cut_there() -> None:
    cluster = Cluster((fast("slow"), fast("quick", 2.0)))
    cluster.look()
    (command,) = cluster.commands
    assert command[:2] == ["shoal", "inspect"]
    assert "--table" in command
    cluster.settle()
    assert cluster.cuts() in {("t6",), ("t7",), ("t13",), ("t14",)}
    assert [each[1] for each in cluster.commands] == ["inspect", "partition"]
    assert cuts_in(cluster.commands[1]) == cluster.cuts()
    sizes = {
        stage.devices: cut_at(TABLE, cluster.cuts()).fragments[stage.fragments[0]].flops
        for stage in cluster.status().stages
    }
    assert sizes["quick",] > sizes["slow",]  # type: ignore[operator]
    assert word(cluster.status(), "Planned") == "True Planned"
    cut = cluster.status().cut
    assert cut is not None
    assert cut.reason.startswith("2 fragments, the best cut for ")
    assert {"ChoseCut", "CutModel", "PlannedPlacement"} <= set(cluster.notes)


def test_until_it_is_chosen_the_partition_says_what_it_waits_for() -> None:
    cluster = Cluster((), placements={})
    cluster.settle()
    assert word(cluster.cut_status(), "Cut") == "False WaitingForPlacement"
    assert [each[1] for each in cluster.commands] == ["inspect"], "nothing is cut for nobody"
    assert cluster.workers == {}


def test_a_cut_that_works_stays_though_another_is_a_little_better() -> None:
    cluster = Cluster((fast("one"), fast("two")))
    cluster.settle()
    assert cluster.cuts() == ("t10",)
    before = cluster.status()
    cluster.devices = (fast("one"), fast("two", 1.25))
    cluster.settle()
    assert cluster.cuts() == ("t10",)
    assert len(cluster.commands) == 2
    assert cluster.status().epoch == before.epoch


def test_another_cut_is_made_where_it_gains_enough_and_the_finished_one_stays_until_then() -> None:
    cluster = Cluster((fast("one"), fast("two")))
    cluster.settle()
    cluster.devices = (fast("one"), fast("two", 4.0))
    cluster.look()
    assert cluster.cuts() != ("t10",)
    cut = cluster.status().cut
    assert cut is not None
    assert "% better than the cut before" in cut.reason
    cluster.look()
    assert cuts_in(cluster.commands[-1]) == cluster.cuts()
    assert word(cluster.cut_status(), "Ready") == "True Ready"
    assert word(cluster.status(), "Planned") == "True Planned"
    epoch = cluster.status().epoch
    assert epoch is not None
    cluster.settle()
    status = cluster.cut_status()
    assert [each.digest for each in status.fragments] == [
        each.digest for each in cut_at(TABLE, cluster.cuts()).fragments
    ]
    assert cluster.status().epoch == epoch + 1
    assert word(cluster.status(), "Planned") == "True Planned"
    assert len(cluster.commands) == 3, "and then nothing changes any more"


def test_a_second_placement_places_what_the_first_has_chosen() -> None:
    first, second = placement(), placement("later", "2026-03-01T13:00:00Z", objective="Latency")
    cluster = Cluster((fast("one"), fast("two")), placements={"later": second, "chooser": first})
    cluster.settle()
    assert cluster.cuts() == ("t10",)
    assert cluster.status("later").cut is None
    assert word(cluster.status("later"), "Planned") == "True Planned"
    assert len(cluster.commands) == 2


def test_where_the_first_placement_is_gone_the_cut_that_there_is_stays() -> None:
    cluster = Cluster((fast("one"), fast("two")))
    cluster.settle()
    cluster.placements = {"next": placement("next")}
    cluster.devices = (fast("one"), fast("two", 1.25))
    cluster.settle()
    cut = cluster.status("next").cut
    assert cut is not None
    assert cut.cuts == ("t10",)
    assert len(cluster.commands) == 2


def test_where_no_cut_fits_the_placement_says_so() -> None:
    cluster = Cluster((fast("tiny", budget=MIB),))
    cluster.settle()
    planned = cluster.status().conditions[0]
    assert (planned.reason, planned.message) == (
        "Infeasible",
        "no cut of rec fits the devices of shelf: one of its layers is too large; raise the budget",
    )


def test_pins_need_cuts_that_are_known() -> None:
    pinned = placement(pins=[{"fragment": 0, "device": "one"}])
    cluster = Cluster((fast("one"), fast("two")), placements={"chooser": pinned})
    cluster.settle()
    assert word(cluster.status(), "Planned") == "False PinsNeedCuts"
    assert cluster.status().cut is None


def test_a_table_that_somebody_spoilt_is_made_again() -> None:
    cluster = Cluster((fast("one"), fast("two")))
    cluster.settle()
    spoilt: dict[str, Any] = dict(cluster.objects[table_name("rec")])
    nonsense = json.dumps({"version": 1, "tensors": [1]}).encode()
    spoilt["binaryData"] = {"cuts.json.gz": base64.b64encode(gzip.compress(nonsense)).decode()}
    assert read_table(spoilt) is None
    cluster.objects[table_name("rec")] = spoilt
    cluster.settle()
    assert [each[1] for each in cluster.commands] == ["inspect", "partition", "inspect"]
    assert word(cluster.cut_status(), "Ready") == "True Ready"


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(3, 16))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_goes_away_and_returns_jobs_end_and_the_cut_is_the_chosen_one(seed: int) -> None:
    table = cut_table([10**9] * LAYERS, [4 * MIB] * LAYERS)
    cluster = started(
        Random(seed),  # noqa: S311
        jobs=2,
        failures=0.05,
        table=table,
        cut=lambda command: cut_at(table, cuts_in(command)),
    )
    planned = {"modelRef": {"name": "rec"}, "cutting": "Planned"}
    cluster.partitions["rec"] = cluster.new(Partition, "rec", planned, {})
    refers = {"partitionRef": {"name": "rec"}, "poolRef": {"name": "shelf"}}
    cluster.placements["rec"] = cluster.new(Placement, "rec", refers, {})
    for number, name in enumerate(cluster.jobs):
        spec = {
            "placementRef": {"name": "rec"},
            "inputs": {"uri": "pvc://lines/in"},
            "outputs": {"uri": f"pvc://lines/out-{number}"},
        }
        cluster.jobs[name] = cluster.new(InferenceJob, name, spec, {})
    for _ in range(60):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        reconcile_all(cluster, dies=0.2)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    settle(cluster)
    for _ in range(30):
        reconcile_all(cluster)
        cluster.pass_time(10)
    check_the_end(cluster)
    chosen, cut = cluster.placements["rec"].status, cluster.partitions["rec"].status
    assert chosen is not None
    assert chosen.cut is not None
    assert cut is not None
    assert [each.digest for each in cut.fragments] == [
        each.digest for each in cut_at(table, chosen.cut.cuts).fragments
    ]
    assert word(chosen, "Planned") == "True Planned"
    assert word(cut, "Ready") == "True Ready"


@pytest.mark.parametrize("cuts", [(), ("a",), ("a", "ij,jk->ik", "--cut", "--digest")])
def test_where_a_partition_was_cut_is_read_back_whatever_the_names(cuts: tuple[str, ...]) -> None:
    arguments = (*cut_arguments(cuts), "--digest", "sha256:0", "--shape", "x=1")
    stored = StoredDocument(recipe="r", arguments=arguments, document=document())
    assert cuts_of(stored) == cuts


def test_a_cut_that_an_operator_of_before_stored_is_read_still() -> None:
    arguments = ("--cuts", "a,b/c", "--digest", "sha256:0")
    stored = StoredDocument(recipe="r", arguments=arguments, document=document())
    assert cuts_of(stored) == ("a", "b/c")
