"""Fragments are fetched and loaded by the devices of a plan before there is a job."""

import asyncio
from dataclasses import replace

import grpc

from coordinator.scripted import ScriptedDevice, connected
from coordinator.world import World, refusal
from shoal_coordinator.server.placements import LEASE_SECONDS, Placements
from shoal_protocol.partition import document_to_json
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb

State = api.PlacedFragment
ABSENT, CACHED, RESIDENT = State.ABSENT, State.CACHED, State.RESIDENT


def plan(world: World, *devices: str) -> api.PlaceFragmentsRequest:
    """One device for each fragment."""
    stages = [api.StagePlacement(devices=[name]) for name in devices]
    partition = document_to_json(world.document).encode()
    return api.PlaceFragmentsRequest(name="shelf", partition=partition, stages=stages)


async def until(
    world: World, request: api.PlaceFragmentsRequest, *wanted: State.State
) -> api.PlacedFragments:
    """Repeat a call until the fragments are in these states."""
    while True:
        answer = await world.stub.PlaceFragments(request, timeout=60)
        if [each.state for each in answer.fragments] == list(wanted):
            return answer
        await asyncio.sleep(0.05)


async def test_devices_of_the_plan_load_their_fragments_also_one_that_joins_later(
    world: World,
) -> None:
    rows = world.inputs(3)
    request = plan(world, "a", "b", "late")
    async with connected(world.device("a"), world.device("b")):
        answer = await until(world, request, RESIDENT, RESIDENT, ABSENT)
        assert [(each.fragment, each.device) for each in answer.fragments] == [
            (0, "a"),
            (1, "b"),
            (2, "late"),
        ]
        assert answer.problem == ""
        async with connected(world.device("late")):
            await until(world, request, RESIDENT, RESIDENT, RESIDENT)
            (seen,) = [s for s in await devices(world) if s.name == "late"]
            assert list(seen.resident) == [world.document.fragments[2].digest]
            await world.submit(stages=request.stages)
            await world.ended()
            assert [each.loads for each in await devices(world)] == [1, 1, 1]
    world.check_results(rows)


async def devices(world: World) -> list[api.DeviceStatus]:
    answer = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=60)
    return list(answer.devices)


async def test_what_has_no_room_is_fetched_and_jobs_take_the_room_that_they_need(
    world: World,
) -> None:
    rows = world.inputs(2)
    request = plan(world, "a", "a", "a")
    async with connected(world.device("a", budget=2500)):
        await until(world, request, RESIDENT, CACHED, RESIDENT)
        await world.submit(stages=request.stages)
        assert (await world.ended()).state == api.JobStatus.COMPLETE
    world.check_results(rows)


async def test_a_fragment_that_no_device_can_hold_is_reported_with_need_and_have(
    world: World,
) -> None:
    async with connected(world.device("a", budget=500)):
        request = plan(world, "a", "a", "a")
        answer = await world.stub.PlaceFragments(request, timeout=60)
    assert [each.state for each in answer.fragments] == [ABSENT] * 3
    assert answer.problem.startswith("Budget: fragment 0 of placement/shelf needs 1000 B")


class Unsound(ScriptedDevice):
    """A device that cannot open a fragment."""

    loads = 0

    async def _receive(self, message: pb.CoordinatorMessage) -> None:
        if message.WhichOneof("message") == "load":
            self.loads += 1
            what = pb.Failure(code=pb.RUNTIME, message="it went wrong")
            await self._reply(message.load.instruction, failure=what)
        else:
            await super()._receive(message)


async def test_a_fragment_that_cannot_run_is_not_tried_again_with_each_renewal(
    world: World,
) -> None:
    request = plan(world, "a", "a", "a")
    device = Unsound(world.target, "a", world.document)
    state = world.coordinator.driver.state
    state.limits = replace(state.limits, load_tries=1)
    async with connected(device):
        async with asyncio.timeout(60):
            while not (await world.stub.PlaceFragments(request, timeout=60)).problem:
                await asyncio.sleep(0.02)
        tries = device.loads
        for _ in range(20):
            answer = await world.stub.PlaceFragments(request, timeout=60)
            await asyncio.sleep(0.02)
        assert "it went wrong" in answer.problem
        assert device.loads == tries
        # Another plan is another matter.
        await world.stub.PlaceFragments(plan(world, "a", "a", "b"), timeout=60)
        async with asyncio.timeout(60):
            while device.loads == tries:
                await asyncio.sleep(0.02)


async def test_a_placement_is_no_job_and_ends_with_its_lease(world: World) -> None:
    now = 0.0
    placements = Placements(world.coordinator.driver, lambda: now)
    request = plan(world, "a", "a", "a")
    async with connected(world.device("a")):
        placements.place(request, world.document)
        assert not [each async for each in world.stub.ListJobs(api.ListJobsRequest(), timeout=60)]
        overview = await world.stub.GetOverview(api.GetOverviewRequest(), timeout=60)
        assert not overview.jobs
        assert len(placements.fragments_in_use()) == 3
        now = LEASE_SECONDS - 1
        placements.place(request, world.document)
        now = 2 * LEASE_SECONDS - 2
        placements.end_expired()
        assert len(placements.fragments_in_use()) == 3
        now = 2 * LEASE_SECONDS
        placements.end_expired()
    assert not placements.fragments_in_use()
    assert not world.coordinator.driver.state.jobs


async def test_without_stages_a_placement_ends_and_without_fragments_it_is_refused(
    world: World,
) -> None:
    request = plan(world, "a", "a", "a")
    await world.stub.PlaceFragments(request, timeout=60)
    assert world.coordinator.driver.state.jobs
    ended = api.PlaceFragmentsRequest(name="shelf", partition=request.partition)
    await world.stub.PlaceFragments(ended, timeout=60)
    assert not world.coordinator.driver.state.jobs
    digest = world.document.fragments[1].digest.removeprefix("sha256:")
    (world.folder / "store" / "fragments" / digest / "fragment.json").unlink()
    code, reason = await refusal(world.stub.PlaceFragments(request, timeout=60))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert reason.startswith("the fragment store lacks fragment 1 ")
