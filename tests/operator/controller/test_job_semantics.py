"""An InferenceJob behaves as people know it from `batch/v1` Job, seen with a pool that really runs.

The last tests look at what the ones before have left.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from pool import read_results, write_items

from cluster_fixtures import or_skip
from controller.jobs import (
    conditions_of,
    cut_already,
    enrolled,
    events_of,
    final_events,
    left_of,
    on_terms,
    run_of,
    secret,
    status_of,
    succeeded,
    token_of,
    unready,
    until_forgotten,
    workers_of,
)
from fake_node import GRACE_SECONDS
from operator_processes import ACCOUNT, Operators, RunningOperator, operators, wait_until
from operator_processes import NAMESPACE as HOME
from parity_with_whole import TOLERANCE, largest_difference, whole
from real_models import MODELS, find
from rights import by_resource, of_rules, used, without
from shoal_cluster import ControlPlane
from shoal_protocol.v1 import coordinator_pb2 as pb
from simulated_world import DEVICES, ITEMS, MODEL, NAMESPACE, World, job_spec, operating

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own, with fake nodes."""
    with or_skip(lambda: ControlPlane(audit=True, node_grace_seconds=GRACE_SECONDS)) as made:
        yield made


# So many that a job of them still runs when a loaded machine has seen its first item done.
MANY = 150
KINDS = (
    *(("model", "m"), ("devicepool", "shelf"), ("partition", "slow"), ("placement", "slow")),
    *(("inferencejob", "slow"), ("device", f"shelf-{DEVICES[0]}")),
)


@pytest.fixture(scope="module")
def running(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    """Operators of all of these tests."""
    with operators(tmp_path_factory.mktemp("operators"), account) as started:
        yield started


@pytest.fixture(scope="module")
def operator(world: World, running: Operators) -> Iterator[RunningOperator]:
    """One for all of these tests, until one of the last ends it."""
    with operating(running, world) as started:
        yield started


@pytest.fixture(autouse=True)
def pool(world: World, operator: RunningOperator) -> None:
    """What every job refers to, and who serves it."""
    world.apply_pool()


async def test_fragments_are_on_their_devices_before_there_is_a_job(world: World) -> None:
    world.apply("Partition", "cut", modelRef={"name": "m"}, fragments=2)
    refs = {"partitionRef": {"name": "cut"}, "poolRef": {"name": "shelf"}}
    world.apply("Placement", "early", **refs, prefetch=True)
    await world.wait("placement", "early", "Prefetched")
    status = world.get("placement", "early")["status"]
    assert {each["fragment"] for each in status["prefetched"]} == {0, 1}
    assert {each["state"] for each in status["prefetched"]} <= {"Cached", "Resident"}
    assert not world.plane.access.get("inferencejobs", "--namespace=jobs")["items"]
    world.patch("placement", "early", prefetch=False)
    await world.until(
        "it is reported no more",
        lambda: not world.condition("placement", "early", "Prefetched"),
    )


@pytest.mark.minutes
async def test_a_job_runs_from_apply_to_complete(world: World) -> None:
    world.apply("InferenceJob", "ocr", **job_spec())
    await world.wait("devicepool", "shelf", "Ready")
    await world.wait("inferencejob", "ocr", "Complete")
    job = world.get("inferencejob", "ocr")
    assert job["status"]["items"] == {
        "total": ITEMS,
        "active": 0,
        "succeeded": ITEMS,
        "failed": 0,
        "following": False,
    }
    results = read_results(world.claims / "lines" / "out")
    inputs = [MODELS[MODEL].inputs(seed) for seed in range(ITEMS)]
    for given, right in zip(results, whole(find(MODEL), inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE
    devices = world.plane.access.get("devices", f"--namespace={NAMESPACE}")["items"]
    assert sorted(each["status"]["node"] for each in devices) == sorted(DEVICES)
    events = world.plane.access.get("events", f"--namespace={NAMESPACE}")["items"]
    told = {each["reason"] for each in events if each["reportingComponent"] == "shoal-operator"}
    assert {"StartedJob", "FinishedJob"} <= told, told


@pytest.mark.minutes
async def test_a_job_that_is_born_suspended_starts_nothing_until_it_is_resumed(
    world: World,
) -> None:
    world.apply("InferenceJob", "born", **job_spec(suspend=True))
    world.kubectl("wait", "--for=condition=Suspended", "ij/born", "--timeout=60s")
    row = world.kubectl("get", "ij", "born").splitlines()[1].split()
    assert row[:3] == ["born", "m", "shelf"]
    assert "Suspended" in row
    assert workers_of(world, "born") == set()
    assert await run_of(world, "born") is None
    world.patch("ij", "born", suspend=False)
    world.kubectl("wait", "--for=condition=Suspended=False", "ij/born", "--timeout=60s")
    await world.wait("inferencejob", "born", "Complete")
    assert await final_events(world, "born") == {"StartedJob": "Normal", "FinishedJob": "Normal"}
    job = world.get("inferencejob", "born")
    assert job["status"]["observedGeneration"] == job["metadata"]["generation"] == 2
    row = world.kubectl("get", "ij", "born").splitlines()[1].split()
    assert f"{ITEMS}/{ITEMS}" in row


async def test_a_running_job_is_suspended_and_goes_on_where_it_was(world: World) -> None:
    inputs = [MODELS[MODEL].inputs(seed) for seed in range(MANY)]
    write_items(world.claims / "lines" / "many", inputs)
    many = job_spec(
        inputs={"uri": "pvc://lines/many"}, outputs={"uri": "pvc://lines/slow"}, parallelism=1
    )
    world.apply("InferenceJob", "slow", **many)
    await world.until("some items are done", lambda: succeeded(world, "slow") > 0)
    world.patch("ij", "slow", suspend=True)
    await world.wait("inferencejob", "slow", "Suspended")
    run = await run_of(world, "slow")
    assert run is not None
    assert run.state == pb.JobStatus.CANCELLED
    before = succeeded(world, "slow")
    assert 0 < before < MANY, "it was suspended too late to say anything"
    assert status_of(world, "slow")["items"]["active"] == 0
    assert "transfer-results" not in workers_of(world, "slow")
    world.patch("ij", "slow", suspend=False)
    await world.until("it goes on", lambda: succeeded(world, "slow") > before)
    # An agent that dies meanwhile costs tries of its items, not the job.
    world.pool.kill(DEVICES[1])
    await world.wait("inferencejob", "slow", "Complete")
    results = read_results(world.claims / "lines" / "slow")
    for given, right in zip(results, whole(find(MODEL), inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE


async def test_a_job_beyond_its_deadline_fails_and_keeps_what_it_has_finished(world: World) -> None:
    outputs = world.claims / "lines" / "late"
    spec = cut_already(
        inputs={"uri": "pvc://lines/many"}, outputs={"uri": "pvc://lines/late"}, parallelism=1
    )
    world.apply("InferenceJob", "late", **spec)
    await world.until("some items are done", lambda: succeeded(world, "late") > 0)
    world.patch("ij", "late", activeDeadlineSeconds=9000, priority=7)
    await on_terms(world, "late", priority=7, parallelism=1, active_deadline_seconds=9000)
    world.patch("ij", "late", activeDeadlineSeconds=1)
    await world.wait("inferencejob", "late", "Failed")
    assert (await final_events(world, "late"))["FinishedJob"] == "Warning"
    failed = world.condition("inferencejob", "late", "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert failed["message"] == "the job was active for longer than 1 s"
    done = succeeded(world, "late")
    assert done > 0
    # An item that was just being stored when the run was stopped stands as well.
    assert done <= len(list(outputs.glob("*.npz"))) < MANY


async def test_items_that_fail_are_named_and_the_others_results_stand(world: World) -> None:
    folder = world.claims / "lines" / "odd"
    write_items(folder, [MODELS[MODEL].inputs(seed) for seed in range(3)])
    name, value = next(iter(MODELS[MODEL].inputs(0).items()))
    np.savez(folder / "odd.npz", **dict[str, Any]({name: value[..., None]}))
    spec = cut_already(inputs={"uri": "pvc://lines/odd"}, outputs={"uri": "pvc://lines/even"})
    world.apply("InferenceJob", "odd", backoffLimit=1, **spec)
    await world.wait("inferencejob", "odd", "Failed")
    failed = world.condition("inferencejob", "odd", "Failed")
    assert failed["reason"] == "ItemsFailed"
    assert failed["message"].startswith("1 of 4 items failed; first: odd.npz[0]: has ")
    status = status_of(world, "odd")
    assert (status["items"]["succeeded"], status["items"]["failed"]) == (3, 1)
    [failure] = status["failures"]
    assert (failure["item"], failure["input"]) == (3, "odd.npz[0]")
    assert len(list((world.claims / "lines" / "even").glob("*.npz"))) == 3


async def test_a_job_outlives_its_pool_and_resumes_when_that_is_made_again(world: World) -> None:
    # It follows its inputs, so it cannot end before its pool is gone, however slow the machine is.
    spec = cut_already(
        inputs={"uri": "pvc://lines/many", "follow": True},
        outputs={"uri": "pvc://lines/orphan"},
        parallelism=1,
    )

    def owners() -> set[str]:
        metadata = world.get("pvc", "shelf-coordinator")["metadata"]
        return {each["kind"] for each in metadata.get("ownerReferences", [])}

    def reason() -> str:
        return str(world.condition("inferencejob", "orphan", "Complete").get("reason"))

    world.apply("InferenceJob", "orphan", **spec)
    await world.until("some items are done", lambda: succeeded(world, "orphan") > 0)
    both = {"DevicePool", "InferenceJob"}
    await world.until("the volume is the job's as well", lambda: owners() == both)
    started = status_of(world, "orphan")["startTime"]
    world.kubectl("delete", "devicepool", "shelf")
    await world.until("the job says so", lambda: reason() == "PoolNotFound")
    message = world.condition("inferencejob", "orphan", "Complete")["message"]
    assert message.startswith("there is no DevicePool shelf; the ")
    # It is posted after the condition is written.
    await world.until(
        "an Event says so", lambda: events_of(world, "orphan").get("PoolNotFound") == "Warning"
    )
    await world.until("Kubernetes keeps the volume", lambda: owners() == {"InferenceJob"})
    world.apply_pool()
    world.patch("ij", "orphan", end=True)
    await world.wait("inferencejob", "orphan", "Complete")
    assert status_of(world, "orphan")["startTime"] == started
    assert len(read_results(world.claims / "lines" / "orphan")) == MANY


async def test_of_jobs_applied_together_the_one_with_the_highest_priority_starts_first(
    world: World,
) -> None:
    priorities = {"low": 0, "middle": 10, "high": 500}
    for name, priority in priorities.items():
        spec = job_spec(outputs={"uri": f"pvc://lines/{name}"})
        world.apply("InferenceJob", name, priority=priority, **spec)
    for name in priorities:
        await world.wait("inferencejob", name, "Complete")
    order = sorted(priorities, key=lambda name: status_of(world, name)["startTime"])
    assert order[0] == "high"


async def test_a_new_plan_does_without_a_node_that_is_cordoned(world: World) -> None:
    def cordoned() -> bool:
        taints = world.plane.access.get("node", DEVICES[0])["spec"].get("taints", [])
        return any(taint["key"] == "node.kubernetes.io/unschedulable" for taint in taints)

    await world.wait("devicepool", "shelf", "Ready")
    world.kubectl("cordon", DEVICES[0])
    await world.until("its taint says so", cordoned)
    world.apply("InferenceJob", "around", **cut_already(outputs={"uri": "pvc://lines/around"}))
    await world.wait("inferencejob", "around", "Complete")
    world.kubectl("uncordon", DEVICES[0])
    stages = world.get("placement", "around")["status"]["stages"]
    assert DEVICES[0] not in {name for stage in stages for name in stage["devices"]}


async def test_a_finished_job_deletes_itself_and_all_that_was_its_own(world: World) -> None:
    spec = job_spec(outputs={"uri": "pvc://lines/brief"})
    world.apply("InferenceJob", "brief", ttlSecondsAfterFinished=1, **spec)
    await world.until("it is there", lambda: "brief" in left_of(world, "brief"))
    await world.until("nothing of it is left", lambda: not left_of(world, "brief"))
    assert len(read_results(world.claims / "lines" / "brief")) == ITEMS
    assert (await final_events(world, "brief"))["FinishedJob"] == "Normal"


async def test_wait_works_for_every_kind_and_ready_is_not_told_of_what_stands_on_a_dead_device(
    world: World,
) -> None:
    for kind, name in KINDS:
        type_ = "Complete" if kind == "inferencejob" else "Ready"
        until = f"--for=condition={type_}"
        said = world.kubectl("wait", until, f"{kind}/{name}", "--timeout=100s")
        assert "condition met" in said
        found = world.get(kind, name)
        observed = found["status"]["observedGeneration"]
        assert observed == found["metadata"]["generation"], kind
    process = world.pool.process_id(DEVICES[0])
    used = world.get("placement", "slow")["status"]["stages"]
    stands = [("device", f"shelf-{DEVICES[0]}"), ("devicepool", "shelf")]
    if any(DEVICES[0] in stage["devices"] for stage in used):
        stands.append(("placement", "slow"))
    os.kill(process, signal.SIGSTOP)
    try:
        for kind, name in stands:
            await world.until(f"{kind} {name} is not Ready", partial(unready, world, kind, name))
            assert world.condition(kind, name, "Ready")["message"], "it says why"
    finally:
        os.kill(process, signal.SIGCONT)
    for kind, name in stands:
        await world.wait(kind, name, "Ready")


async def test_an_agents_pod_gets_a_certificate_for_its_node_and_for_no_other(
    world: World, operator: RunningOperator
) -> None:
    """The token is one that the API server gives to the pod that the DaemonSet has made."""
    await world.wait("devicepool", "shelf", "Ready")
    pods = world.plane.access.get(
        "pods", f"--namespace={NAMESPACE}", "--selector=app.kubernetes.io/component=agent"
    )["items"]
    pod = next(each for each in pods if each["spec"].get("nodeName") == "one")
    authority = secret(world.plane, "shoal-system", "shoal-ca")["ca.crt"]
    await asyncio.to_thread(wait_until, "enrolment listens", lambda: operator.enrolment is not None)
    assert operator.enrolment is not None
    answer = await enrolled(operator.enrolment, authority, token_of(world, pod), "one")
    with pytest.raises(grpc.aio.AioRpcError, match="may have 'one'"):
        await enrolled(operator.enrolment, authority, token_of(world, pod, "20m"), "two")
    certificate = x509.load_pem_x509_certificate(answer.certificate_chain)
    assert certificate.subject.rfc4514_string() == "CN=one"
    of_the_pool = secret(world.plane, NAMESPACE, "shelf-ca")["tls.crt"]
    assert answer.authority == of_the_pool
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(of_the_pool))


async def test_a_failed_job_that_is_retried_runs_and_completes(
    world: World, operator: RunningOperator, running: Operators
) -> None:
    spec = cut_already(outputs={"uri": "pvc://lines/again"}, parallelism=1, activeDeadlineSeconds=1)
    world.apply("InferenceJob", "again", **spec)
    await world.wait("inferencejob", "again", "Failed")
    assert world.condition("inferencejob", "again", "Failed")["reason"] == "DeadlineExceeded"
    world.patch("inferencejob", "again", activeDeadlineSeconds=None, retry={"number": 1})
    await world.until("it is retried", lambda: "retry" in status_of(world, "again"))
    assert "completionTime" not in status_of(world, "again")
    operator.kill()
    with operating(running, world):
        await world.wait("inferencejob", "again", "Complete")
    status = status_of(world, "again")
    assert (status["retry"]["number"], status["items"]["succeeded"]) == (1, ITEMS)
    assert world.condition("inferencejob", "again", "Failed")["status"] == "False"
    assert len(read_results(world.claims / "lines" / "again")) == ITEMS
    patch = '{"status": {"completionTime": null}}'
    arguments = ("patch", "inferencejob", "again", "--subresource=status", "--type=merge")
    with pytest.raises(Exception, match=r"Forbidden|denied|Invalid|ended"):
        world.kubectl(*arguments, f"--patch={patch}")


async def test_a_job_survives_the_death_of_its_operator_and_one_that_is_deleted_is_cancelled(
    world: World, running: Operators
) -> None:
    await world.wait("devicepool", "shelf", "Ready")
    world.apply("InferenceJob", "long", **cut_already(outputs={"uri": "pvc://lines/long"}))
    await world.wait("inferencejob", "long", "Planned")
    running.latest.kill()
    world.apply("InferenceJob", "gone", **cut_already(outputs={"uri": "pvc://lines/gone"}))
    with operating(running, world):
        await world.wait("inferencejob", "long", "Complete")
        world.plane.kubectl("delete", "inferencejob", "gone", f"--namespace={NAMESPACE}")
        await asyncio.to_thread(
            wait_until, "nothing of the deleted job is left", lambda: not left_of(world, "gone")
        )
        await until_forgotten(world, "gone")
    assert len(read_results(world.claims / "lines" / "long")) == ITEMS


async def test_inputs_of_a_job_that_was_deleted_before_it_was_submitted_are_removed(
    world: World, running: Operators
) -> None:
    left = world.pool.store / "jobs" / "early-0a1b2c3d"
    (left / "in").mkdir(parents=True)
    (left / "in" / "line.npz").write_bytes(b"what a worker has transferred")
    assert (await world.pool.client.fragments()).unsubmitted == [left.name]
    await until_forgotten(world, "early")
    assert not left.exists()


async def test_a_new_operator_has_nothing_new_to_tell_of_a_pool_at_rest(
    world: World, running: Operators
) -> None:
    """Above all not that the coordinator, which it has not asked yet, does not answer."""
    running.close()
    with operating(running, world) as operator:
        await world.wait("devicepool", "shelf", "Ready")
        await asyncio.to_thread(
            wait_until, "all is told", lambda: operator.metric("shoal_operator_queue_depth") == 0
        )
        before = conditions_of(world)
        assert operator.stop() == 0
    with operating(running, world) as operator:
        await asyncio.to_thread(
            wait_until,
            "all was looked at",
            lambda: operator.metric("shoal_operator_reconcile_seconds_count") >= len(before),
        )
        assert conditions_of(world) == before


# What no job of these tests needs, and what does.
UNUSED = {
    "pods": {
        "get": "an API server before 1.32 does not say to which node a token is bound",
        "patch": "the budget of a pool is edited",
    },
    "daemonsets.apps": {"delete": "a size of node is gone, with budget.percent"},
    "devices.shoal.dev": {"delete": "a node is not selected any more"},
}


async def test_the_operator_was_never_refused_and_needs_each_right_that_it_has(
    world: World,
) -> None:
    """The last of these tests: it reads what the others have made the operator do."""
    allowed, forbidden = used(world.plane, f"system:serviceaccount:{HOME}:{ACCOUNT}")
    assert forbidden == {}
    granted = by_resource(of_rules(("ClusterRole", ACCOUNT), ("Role", ACCOUNT)))
    unused = {name: verbs for (name, _), verbs in without(granted, allowed).items()}
    # A claim that is not bound, or a worker that has no pod: some have none for a moment.
    unused.pop("events", None)
    assert unused == {name: set(verbs) for name, verbs in UNUSED.items()}
