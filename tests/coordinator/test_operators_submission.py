"""A submission of the operator, as the coordinator receives it."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest
import pytest_asyncio

from coordinator.world import World
from shoal_operator.controller.coordinators import Coordinators
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_operator.reconcile.decision import SubmitJob, Terms
from shoal_operator.reconcile.snapshot import CoordinatorView
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import document_to_json
from shoal_protocol.v1 import coordinator_pb2 as api


@pytest_asyncio.fixture
async def coordinators(world: World) -> AsyncIterator[Coordinators]:
    """An operator's view of the one coordinator, which has answered."""

    async def dial(namespace: str, pool: str, target: str) -> grpc.aio.Channel:
        return open_channel(target)

    made = Coordinators(
        dial,
        OperatorMetrics(),
        has_work=lambda namespace, pool: True,
        changed=lambda topics: None,
    )
    made.follow("lab", "shelf", world.target)
    await made.all_polled(20)
    yield made
    await made.close()


def submission(world: World, *, lossy: bool = False) -> SubmitJob:
    return SubmitJob(
        pool="shelf",
        job="ocr",
        partition=document_to_json(world.document).encode(),
        stages=(("one",), ("one", "two"), ("two",)),
        granted_bytes=((0,), (700, 0), (0,)),
        predicted_seconds=((0.25,), (0.5, 1.0), ()),
        plan=3,
        mode="Barrier",
        policy="LeastLoaded",
        backoff_limit=7,
        terms=Terms(priority=5, parallelism=4, active_deadline_seconds=600.0),
        lossy=lossy,
        retry=2,
        retried_items=(4, 9),
        final_cut=True,
    )


@pytest.mark.parametrize("lossy", [False, True])
async def test_a_submission_says_what_the_job_says(
    world: World, coordinators: Coordinators, lossy: bool
) -> None:
    wanted = submission(world, lossy=lossy)
    await coordinators.call("lab", wanted)
    job = world.coordinator.jobs.find("ocr")
    assert job is not None
    assert job.request is not None
    view = coordinators.view("lab", "shelf")
    assert isinstance(view, CoordinatorView)
    assert view.runs["ocr"].final_cut
    taken = api.SubmitJobRequest()
    taken.CopyFrom(job.request)
    assert taken.inputs_uri.endswith("jobs/ocr/in")
    assert taken.outputs_uri.endswith("jobs/ocr/out")
    taken.ClearField("inputs_uri")
    taken.ClearField("outputs_uri")
    assert taken == api.SubmitJobRequest(
        name="ocr",
        partition=wanted.partition,
        stages=[
            api.StagePlacement(devices=["one"], granted_bytes=[0], predicted_seconds=[0.25]),
            api.StagePlacement(
                devices=["one", "two"], granted_bytes=[700, 0], predicted_seconds=[0.5, 1.0]
            ),
            api.StagePlacement(devices=["two"], granted_bytes=[0]),
        ],
        epoch=3,
        mode=api.BARRIER,
        policy=api.LEAST_LOADED,
        priority=5,
        backoff_limit=7,
        active_deadline_seconds=600.0,
        lossy=lossy,
        parallelism=4,
        retry=api.Retry(number=2, items=[4, 9]),
        final_cut=True,
    )


async def test_a_refusal_is_remembered_until_the_job_is_accepted(
    world: World, coordinators: Coordinators
) -> None:
    wanted = submission(world)
    await coordinators.call("lab", replace(wanted, partition=b"no partition"))
    refusal = coordinators.refusal("lab", "shelf", "ocr")
    assert refusal is not None
    assert (refusal.plan, refusal.terms) == (wanted.plan, wanted.terms)
    await coordinators.call("lab", wanted)
    assert coordinators.refusal("lab", "shelf", "ocr") is None


async def test_a_refusal_says_whether_the_job_may_go_on_so_when_it_was_stopped(
    world: World, coordinators: Coordinators
) -> None:
    """Another mode makes the same results, and float16 on the way does not."""
    await coordinators.call("lab", submission(world))
    first = world.coordinator.jobs.find("ocr")
    assert first is not None
    assert first.request is not None
    world.inputs(3)
    shutil.copytree(world.folder / "in", first.request.inputs_uri, dirs_exist_ok=True)
    await coordinators.call("lab", submission(world))
    for wanted, may in (
        (replace(submission(world), mode="Streaming", plan=4), True),
        (replace(submission(world, lossy=True), plan=4), False),
    ):
        await coordinators.call("lab", wanted)
        refusal = coordinators.refusal("lab", "shelf", "ocr")
        assert refusal is not None
        assert (refusal.plan, refusal.other_way) == (4, may)
