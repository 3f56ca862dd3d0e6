"""What holds of every decision, over generated snapshots: `rules.decide` asks all of it."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from reconcile.rules import decide
from reconcile.test_device_pool import node
from reconcile.test_device_pool import run as named_run
from reconcile.test_device_pool import snapshot as pool_snapshot
from reconcile.test_inference_job import PLANNED, job, knows, run, silent, written
from reconcile.test_model import inspected
from reconcile.test_partition import partition, ready_model
from reconcile.test_placement import KEPT, PARTITION, device, placement
from reconcile.values import DIGEST, MIB, NOW, OTHER_DIGEST, SETTINGS, document, make, model, pool
from shoal_api.conditions import holds
from shoal_api.kinds import DevicePool
from shoal_api.kinds.placement import PlacementStatus
from shoal_operator.reconcile.agents import selected_nodes
from shoal_operator.reconcile.decision import Terms
from shoal_operator.reconcile.job_status import has_ended
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DevicePoolSnapshot,
    DeviceState,
    InferenceJobSnapshot,
    ModelSnapshot,
    PartitionSnapshot,
    PlacementSnapshot,
    Refusal,
    RunState,
    Unreachable,
    Worker,
    WorkerPhase,
    Workload,
)
from shoal_operator.reconcile.times import as_time, instant, seconds_since
from shoal_operator.reconcile.volumes import Claim
from shoal_operator.reconcile.workers import (
    input_transfer_worker,
    inspect_worker,
    result_transfer_worker,
)
from shoal_protocol.partition import document_to_json
from shoal_protocol.units import Bytes


def often(examples: int) -> settings:
    """How often; never how fast, on a machine that others use."""
    return settings(max_examples=examples, deadline=None)


TEXTS = st.text(max_size=40) | st.just("x" * 40_000)
PHASES = st.sampled_from(WorkerPhase)
UNREACHABLE = st.builds(Unreachable, reason=TEXTS)
TIMES = st.integers(0, 100_000).map(lambda seconds: as_time(instant(NOW) + seconds))
COUNTS = st.integers(0, 2**40)
RATES = st.floats(0, 1e9)


def workers(
    names: list[str], outputs: st.SearchStrategy[bytes | None]
) -> st.SearchStrategy[tuple[Worker, ...]]:
    """Some of these workers, in any phase."""
    each = [
        st.none()
        | st.builds(
            Worker,
            name=st.just(name),
            phase=PHASES,
            output=outputs,
            message=TEXTS,
            refused=st.booleans(),
            ended_at=st.none() | TIMES,
            end_seen=st.none() | st.floats(-1e9, 1e9),
        )
        for name in names
    ]
    return st.tuples(*each).map(lambda found: tuple(one for one in found if one is not None))


# ---- Model, Partition ----------------------------------------------------------------------------

MODELS = st.builds(
    lambda uri, digest, generation: model(uri, generation=generation, **digest),
    st.sampled_from(["pvc://models/a.onnx", "https://x.example/a", "file:///a", "pvc://-/a", "a"]),
    st.sampled_from([{}, {"digest": DIGEST}]),
    st.integers(1, 5),
)


@often(50)
@given(data=st.data(), of=MODELS, offline=st.booleans())
def test_models(data: st.DataObject, of: object, offline: bool) -> None:
    outputs = st.sampled_from([None, b"", b"[]", inspected(), inspected(OTHER_DIGEST)])
    assert not isinstance(of, DevicePool)
    for now in sorted(data.draw(st.lists(TIMES, min_size=1, max_size=4))):
        name = inspect_worker(of).name  # type: ignore[arg-type]
        seen = data.draw(workers([name, "rec-inspect-00000000"], outputs))
        decision = decide(
            ModelSnapshot(
                now=now,
                settings=replace(SETTINGS, offline=offline),
                model=of,  # type: ignore[arg-type]
                workers=seen,
            )
        )
        digest = of.status.digest if of.status is not None else None  # type: ignore[attr-defined]
        assert digest is None or decision.status.digest == digest  # type: ignore[attr-defined]
        of = replace(of, status=decision.status)  # type: ignore[type-var]


HOWS = st.sampled_from([{}, {"fragments": 3}, {"maxFragmentSize": "16Mi"}, {"cuts": ["t1"]}])


@often(50)
@given(data=st.data(), how=HOWS, kept=st.sampled_from([None, KEPT]), pools=st.booleans())
def test_partitions(data: st.DataObject, how: dict[str, Any], kept: object, pools: bool) -> None:
    of = partition(**how)
    outputs = st.sampled_from(
        [None, b"", document_to_json(document()).encode(), document_to_json(document(300)).encode()]
    )
    base = PartitionSnapshot(
        now=NOW,
        settings=SETTINGS,
        partition=of,
        model=data.draw(st.sampled_from([None, model(), ready_model()])),
        document=kept,  # type: ignore[arg-type]
        pools=(pool(),) if pools else (),
    )
    made = [str(c["metadata"]["name"]) for c in decide(base).children]  # type: ignore[index]
    for now in sorted(data.draw(st.lists(TIMES, min_size=1, max_size=4))):
        seen = data.draw(workers([*made, "rec-3-cut-00000000"], outputs))
        decision = decide(replace(base, now=now, workers=seen))
        ready = holds(decision.status.conditions, "Ready")
        assert ready == bool(decision.status.fragments)  # type: ignore[attr-defined]
        status: Any = decision.status
        base = replace(base, partition=replace(of, status=status))


# ---- Placement, DevicePool -----------------------------------------------------------------------

FLEETS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.sampled_from(DeviceState), st.sampled_from([8, 24, 64])),
).map(
    lambda fleet: CoordinatorView(
        begun=0.0,
        devices=tuple(device(n, s, b * MIB) for n, (s, b) in sorted(fleet.items())),
        runs={},
        fragments=frozenset(),
    )
)


@often(50)
@given(snapshots=st.lists(st.tuples(TIMES, FLEETS | UNREACHABLE), min_size=1, max_size=8))
def test_placements(snapshots: list[tuple[str, CoordinatorView | Unreachable]]) -> None:
    of, epoch = placement(), 0
    for now, view in sorted(snapshots, key=lambda seen: seen[0]):
        decision = decide(
            PlacementSnapshot(
                now=now,
                settings=SETTINGS,
                placement=of,
                partition=PARTITION,
                document=KEPT,
                pool=pool(),
                view=view,
            )
        )
        status = decision.status
        assert isinstance(status, PlacementStatus)
        before = of.status.stages if of.status is not None else ()
        assert (status.epoch or 0) >= epoch, "the epoch never falls"
        moved = bool(status.stages) and status.stages != before and epoch > 0
        if moved and {s.devices for s in status.stages} != {s.devices for s in before}:
            assert (status.epoch or 0) > epoch, "another plan is another epoch"
        if holds(status.conditions, "Ready"):
            assert isinstance(view, CoordinatorView)
            there = {each.name for each in view.devices if each.state in ("Ready", "Silent")}
            assert {name for stage in status.stages for name in stage.devices} <= there
        of, epoch = replace(of, status=status), status.epoch or 0


LABELS = st.sampled_from([{}, {"shoal.dev/pool": "shelf"}])
TAINTS = st.sampled_from([(), (("edge", "yes", "NoSchedule"),)])
NODES = st.lists(
    st.builds(
        lambda name, memory, labels, ready, taints: node(
            name, memory * MIB, labels=labels, ready=ready, taints=taints
        ),
        st.sampled_from(["n1", "n2", "ip-10-0-0-1.eu.internal", "n" * 63]),
        st.integers(1, 4096),
        LABELS,
        st.booleans(),
        TAINTS,
    ),
    unique_by=lambda one: one.name,
    max_size=4,
).map(tuple)
BUDGETS = st.sampled_from([{"memory": "64Mi"}, {"percent": 1}, {"percent": 50}, {"percent": 95}])
WORKLOADS = st.builds(
    Workload,
    name=st.just("shelf-agent"),
    wanted=st.just(2),
    ready=st.integers(0, 2),
    current=st.booleans(),
    message=st.just("") | TEXTS,
)


@st.composite
def pools(draw: st.DrawFn) -> DevicePoolSnapshot:
    """A pool in any state."""
    nodes = draw(NODES)
    names = st.sampled_from([*(each.name for each in nodes), "stranger"])
    fleet = draw(st.dictionaries(names, st.sampled_from(DeviceState)))
    runs = draw(st.dictionaries(st.sampled_from(["a-1", "b-2"]), st.sampled_from(RunState)))
    view = CoordinatorView(
        begun=0.0,
        devices=tuple(device(name, state) for name, state in sorted(fleet.items())),
        runs={name: named_run(name, state) for name, state in runs.items()},
        fragments=frozenset(),
    )
    spec = {"nodeSelector": {"shoal.dev/pool": "shelf"}, "budget": draw(BUDGETS)}
    of = make(DevicePool, draw(st.sampled_from(["shelf", "p" * 63])), spec)
    claim = st.builds(
        Claim, name=st.just("c"), bound=st.booleans(), size=st.just(Bytes(5 << 30)), message=TEXTS
    )
    return pool_snapshot(
        of,
        nodes=nodes,
        view=draw(st.just(view) | UNREACHABLE),
        coordinator=draw(st.none() | WORKLOADS),
        agents=tuple(draw(st.lists(WORKLOADS, max_size=1))),
        claim=draw(st.none() | claim),
        jobs=draw(st.sampled_from([frozenset(), frozenset({"a-1"})])),
        settings=replace(
            SETTINGS, cert_manager=draw(st.booleans()), pod_monitors=draw(st.booleans())
        ),
    )


@often(40)
@given(snapshot=pools())
def test_device_pools(snapshot: DevicePoolSnapshot) -> None:
    decision = decide(snapshot)
    if not holds(decision.status.conditions, "Ready"):
        return
    assert isinstance(snapshot.view, CoordinatorView)
    ready = {each.name for each in snapshot.view.devices if each.state is DeviceState.READY}
    nodes = selected_nodes(snapshot.pool, snapshot.nodes)
    assert nodes
    assert {each.name for each in nodes} <= ready
    assert snapshot.coordinator is not None
    assert snapshot.coordinator.ready


# ---- InferenceJob --------------------------------------------------------------------------------

TERMS = st.builds(Terms, active_deadline_seconds=st.sampled_from([0.0, 60.0]))
REFUSALS = st.builds(Refusal, plan=st.integers(0, 2), terms=TERMS, message=TEXTS)
RUNS = st.builds(
    run,
    st.sampled_from(RunState),
    succeeded=st.integers(0, 24),
    failed=st.integers(0, 3),
    message=TEXTS,
    reason=TEXTS | st.just("Budget"),
    plan=st.integers(0, 3),
    terms=TERMS,
    items_per_second=RATES,
    seconds=st.floats(0, 1e6),
    completing=st.booleans(),
    started_seconds=st.floats(),
    tier_hits=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS),
    failures=st.lists(st.tuples(COUNTS, TEXTS, TEXTS), max_size=20).map(tuple),
)


@st.composite
def job_snapshots(draw: st.DrawFn) -> InferenceJobSnapshot:
    """A job in any state, on the way through what it needs."""
    names = [
        worker_spec(job(), "shelf").name
        for worker_spec in (input_transfer_worker, result_transfer_worker)
    ]
    base = replace(
        PLANNED,
        workers=draw(workers(names, st.none())),
        refusal=draw(st.none() | REFUSALS),
        now=draw(TIMES),
    )
    for missing in draw(st.sets(st.sampled_from(["model", "partition", "placement", "pool"]))):
        if draw(st.integers(0, 3)) == 0:
            base = replace(base, **{missing: None})  # type: ignore[arg-type]
    match draw(st.integers(0, 4)):
        case 0:
            return silent(base)
        case 1:
            return knows(base)
        case _:
            return knows(base, draw(RUNS))


@often(40)
@given(
    snapshots=st.lists(st.tuples(job_snapshots(), st.booleans()), min_size=1, max_size=6),
    limit=st.sampled_from([{}, {"activeDeadlineSeconds": 60}, {"ttlSecondsAfterFinished": 60}]),
)
def test_inference_jobs(
    snapshots: list[tuple[InferenceJobSnapshot, bool]], limit: dict[str, object]
) -> None:
    status = None
    snapshots.sort(key=lambda seen: seen[0].now)
    for place, (snapshot, suspend) in enumerate(snapshots, 1):
        of = replace(job(generation=place, suspend=suspend, **limit), status=status)
        ended = status is not None and has_ended(status)
        decision = decide(snapshot := replace(snapshot, job=of))
        status = written(snapshot, decision).job.status
        assert status is not None
        if ended or not holds(status.conditions, "Complete"):
            assert ended or not decision.delete_self
            continue
        assert status.items is not None or not snapshots
        assert status.completion_time is not None


# ---- times ---------------------------------------------------------------------------------------


@given(seconds=st.integers(0, 4_000_000_000))
def test_times_are_read_as_they_were_written(seconds: int) -> None:
    assert instant(as_time(seconds)) == seconds


def test_times_of_any_zone_are_one_instant() -> None:
    assert instant("2026-03-01T12:00:00Z") == 1_772_366_400
    assert instant("2026-03-01T14:30:00.5+02:30") == 1_772_366_400.5
    assert instant("2024-02-29T23:59:59-00:01") == instant("2024-03-01T00:00:59Z")
    assert seconds_since("2026-03-01T12:00:10Z", "2026-03-01T12:00:00Z") == 0
