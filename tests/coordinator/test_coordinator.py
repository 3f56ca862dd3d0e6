"""The whole coordinator over real gRPC, with scripted devices."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from coordinator.scripted import (
    STAGES,
    ScriptedDevice,
    connected,
    put_model,
    submission,
    whole_model,
)
from shoal_operator.api.partition import PartitionDocument
from shoal_operator.shell.coordinator import Coordinator, CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.files import FileReceiver
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

if TYPE_CHECKING:
    from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorAsyncStub

ENDED = (api.JobStatus.COMPLETE, api.JobStatus.FAILED, api.JobStatus.CANCELLED)


@dataclass
class World:
    """A running coordinator, a client of it, and folders."""

    coordinator: Coordinator
    target: str
    document: PartitionDocument
    stub: "CoordinatorAsyncStub"
    channel: grpc.aio.Channel
    folder: Path

    def device(self, name: str, **options: object) -> ScriptedDevice:
        return ScriptedDevice(self.target, name, self.document, **options)  # type: ignore[arg-type]

    def inputs(self, *rows_of_files: int, size: int = 100) -> np.ndarray:
        """Files with so many rows each; all rows, in order."""
        folder = self.folder / "in"
        folder.mkdir(exist_ok=True)
        total = sum(rows_of_files)
        rows = np.random.default_rng(0).normal(size=(total, 1, size)).astype(np.float32)
        start = 0
        for number, count in enumerate(rows_of_files):
            np.savez(folder / f"{number:03}.npz", x=rows[start : start + count])
            start += count
        return rows

    def request(self, **fields: object) -> api.SubmitJobRequest:
        return submission(self.document, self.folder / "in", self.folder / "out", **fields)

    async def submit(self, **fields: object) -> api.JobStatus:
        return await self.stub.SubmitJob(self.request(**fields), timeout=10)

    async def ended(self, name: str = "job") -> api.JobStatus:
        watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
        statuses = [status async for status in self.stub.WatchJob(watch, timeout=30)]
        assert statuses[-1].state in ENDED
        return statuses[-1]

    async def until(self, ready: Callable[[api.JobStatus], bool], name: str = "job") -> None:
        watch = api.WatchJobRequest(name=name, interval_seconds=0.05)
        call = self.stub.WatchJob(watch, timeout=30)
        async for status in call:
            if ready(status):
                break
        call.cancel()

    def check_results(self, rows: np.ndarray, folder: str = "out") -> None:
        made: list[np.ndarray] = []
        for path in sorted((self.folder / folder).glob("*.npz")):
            with np.load(path) as file:
                np.testing.assert_allclose(file["early"] * -5 + 1, file["y"], atol=1e-5)
                made.extend(file["y"])
        np.testing.assert_allclose(np.stack(made), whole_model(rows)["y"], atol=1e-5)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target,
        store=tmp_path / "store",
        state=tmp_path / "state",
        metrics="127.0.0.1:0",
        silence_seconds=0.5,
        patience_seconds=0.5,
    )
    async with serving(settings) as coordinator, open_channel(target) as channel:
        yield World(coordinator, target, document, CoordinatorStub(channel), channel, tmp_path)


async def test_a_job_streams_through_three_devices(world: World) -> None:
    rows = world.inputs(5, 1, 4)
    devices = [world.device(name, budget=1500) for name in ("a", "b", "c")]
    async with connected(*devices):
        status = await world.submit()
        assert status.items == 10
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert (last.succeeded, last.failed, last.resumed) == (10, 0, 0)
    assert last.seconds > 0
    assert last.items_per_second > 0
    assert last.latency.p50_seconds > 0
    assert [stage.finished for stage in last.stages] == [10, 10, 10]
    assert last.stages[0].compute_seconds == pytest.approx(0.001, rel=0.1)
    world.check_results(rows)
    done = [task for device in devices for task in device.executed]
    assert sorted(done) == [(item, stage) for item in range(10) for stage in range(3)]


async def test_large_activations_are_relayed_in_many_frames(world: World) -> None:
    rows = world.inputs(3, size=1_000_000)
    devices = [world.device(name, budget=1500, frame_bytes=1 << 18) for name in ("a", "b", "c")]
    async with connected(*devices):
        await world.submit()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)


async def test_an_item_that_does_not_suit_fails_and_the_others_finish(world: World) -> None:
    rows = world.inputs(2)
    np.savez(world.folder / "in" / "bad.npz", x=np.zeros((2, 2, 3, 7)))
    async with connected(world.device("a")):
        await world.submit()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE
    assert (last.items, last.succeeded, last.failed) == (3, 2, 1)
    (failure,) = last.failures
    assert (failure.item, failure.input) == (2, "bad.npz")
    assert "has rank 4 in x: the array is [2, 2, 3, 7]" in failure.reason
    listed = json.loads((world.folder / "out" / "failures.json").read_text())
    assert listed["failures"] == [{"item": 2, "input": "bad.npz", "reason": failure.reason}]
    world.check_results(rows)


async def test_a_task_that_keeps_failing_fails_its_item(world: World) -> None:
    def picky(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if tensors["a"][0, 0] > 99:
            raise ValueError("too large")
        return STAGES[1](tensors)

    world.inputs(4)
    np.save(world.folder / "in" / "large.npy", np.full((1, 3), 50, np.float32))
    async with connected(world.device("a", stages=(STAGES[0], picky, STAGES[2]))):
        await world.submit(backoff_limit=1)
        last = await world.ended()
    assert (last.succeeded, last.failed) == (4, 1)
    assert last.failures[0].input == "large.npy"
    assert "too large" in last.failures[0].reason
    assert last.retries >= 1


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda folder: None, "in: does not exist"),
        (lambda folder: (folder / "in").mkdir(), "in: is empty: it has no .npz or .npy"),
        (
            lambda folder: (
                (folder / "in").mkdir(),
                np.save(folder / "in" / "a.npy", np.zeros((1, 3), np.float32)),
                (folder / "out").write_text("a file"),
            ),
            "out: cannot be written",
        ),
    ],
)
async def test_a_job_whose_folders_will_not_do_fails_at_once(
    world: World, prepare: Callable[[Path], object], text: str
) -> None:
    prepare(world.folder)
    status = await world.submit()
    assert status.state == api.JobStatus.FAILED
    assert text in status.message


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_what_is_no_job_is_refused_with_the_reason(world: World) -> None:
    world.inputs(1)
    refused = grpc.StatusCode.INVALID_ARGUMENT
    assert await refusal(world.submit(partition=b"{}")) == (
        refused,
        "partition document, version: is missing",
    )
    code, text = await refusal(world.submit(name="../../etc"))
    assert (code, text) == (refused, "'../../etc' is no name for a job, such as ocr-1")
    code, text = await refusal(world.submit(stages=[api.StagePlacement(devices=["a"])]))
    assert (code, text) == (refused, "the plan has 1 stages, the partition 3")
    code, text = await refusal(world.submit(active_deadline_seconds=float("nan")))
    assert (code, text) == (refused, "active_deadline_seconds is nan")
    digest = world.document.fragments[1].digest.removeprefix("sha256:")
    (world.folder / "store/fragments" / digest / "model.onnx").unlink()
    code, text = await refusal(world.submit())
    assert code == refused
    assert text.startswith(f"the fragment store lacks fragment 1 (sha256:{digest[:12]})")
    code, text = await refusal(world.stub.CancelJob(api.CancelJobRequest(name="x"), timeout=5))
    assert (code, text) == (grpc.StatusCode.NOT_FOUND, "there is no job 'x' here")


async def test_the_same_job_is_joined_and_another_of_its_name_refused(world: World) -> None:
    rows = world.inputs(3)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(epoch=3)
        again = await world.submit(epoch=4)
        assert again.epoch == 3
        code, text = await refusal(world.submit(backoff_limit=7))
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert text.startswith("job job runs already, with another content")
        for _ in range(9):
            gate.release()
        first = await world.ended()
        assert first.state == api.JobStatus.COMPLETE
        # Running it again finds everything done, in a newer epoch.
        await world.submit()
        second = await world.ended()
    assert (second.state, second.resumed, second.succeeded) == (api.JobStatus.COMPLETE, 3, 3)
    assert second.epoch == 4
    world.check_results(rows)


async def test_several_jobs_share_the_devices(world: World) -> None:
    rows = world.inputs(4)
    names = ["one", "two", "three"]
    async with connected(world.device("a"), world.device("b")):
        for name in names:
            await world.submit(name=name, outputs_uri=f"{world.folder}/{name}")
        for name in names:
            assert (await world.ended(name)).state == api.JobStatus.COMPLETE
    for name in names:
        world.check_results(rows, name)


async def test_two_jobs_do_not_write_into_one_folder(world: World) -> None:
    world.inputs(1)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(name="one")
        other = await world.submit(name="two")
    assert other.state == api.JobStatus.FAILED
    assert "hold results of another job, 'one'" in other.message


async def test_a_cancelled_job_leaves_no_half_result_and_can_go_on(world: World) -> None:
    rows = world.inputs(4, 1)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        for _ in range(7):
            gate.release()
        await world.until(lambda status: status.succeeded >= 1)
        status = await world.stub.CancelJob(
            api.CancelJobRequest(name="job", reason="no need"), timeout=10
        )
        assert (status.state, status.message) == (api.JobStatus.CANCELLED, "no need")
        assert not (world.folder / "out" / "000.npz").exists()
        for _ in range(100):
            gate.release()
        again = await world.submit()
        last = await world.ended()
    assert again.resumed == last.resumed >= 1
    assert last.state == api.JobStatus.COMPLETE
    world.check_results(rows)


async def test_a_deadline_ends_a_job(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a", gate=asyncio.Semaphore(0))):
        await world.submit(active_deadline_seconds=0.3)
        last = await world.ended()
    assert last.state == api.JobStatus.FAILED
    assert "the deadline passed with 2 of 2 items not ended" in last.message


async def test_the_work_of_a_lost_device_is_done_by_another(world: World) -> None:
    rows = world.inputs(6)
    gate = asyncio.Semaphore(2)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        await world.until(lambda status: any(stage.finished for stage in status.stages))
    async with connected(world.device("b")):
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert last.retries > 0
    world.check_results(rows)
    response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=5)
    assert {device.name: device.state for device in response.devices}["a"] == (
        api.DeviceStatus.LOST
    )


async def test_a_device_that_falls_silent_is_probed_and_then_lost(world: World) -> None:
    rows = world.inputs(3)
    silent, steady = world.device("a", gate=asyncio.Semaphore(0)), world.device("b")
    async with connected(silent):
        await world.submit()
        await world.until(lambda status: status.active > 0)
        silent.deaf = True
        async with connected(steady):
            last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)


async def test_a_new_session_of_a_device_takes_the_place_of_the_old(world: World) -> None:
    rows = world.inputs(3)
    old, new = world.device("a", gate=asyncio.Semaphore(0)), world.device("a")
    running = asyncio.create_task(old.run())
    await old.welcome
    await world.submit()
    async with connected(new):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert caught.value.details() == "the device has opened a new session"
        assert (await new.welcome).session > (await old.welcome).session
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE
    world.check_results(rows)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"protocol": 2}, "speaks protocol 2; this coordinator speaks 1"),
        ({"device": "Pi_4"}, "'Pi_4' is no DNS label"),
        ({"budget_bytes": 0}, "device a has a budget of 0 bytes"),
        ({"cached": [{"digest": "sha256:../x"}]}, "is no digest"),
        ({"resident": [{"digest": "sha256:" + "0" * 64}] * 4097}, "more than 4096 fragments"),
    ],
)
async def test_a_bad_hello_opens_no_session(world: World, fields: dict, text: str) -> None:  # type: ignore[type-arg]
    hello = pb.Hello(**{"protocol": 1, "device": "a", "budget_bytes": 1, **fields})
    code, details = await refusal(world.device("a", hello=hello).run())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text in details


async def test_the_status_of_devices_is_what_they_told(world: World) -> None:
    world.inputs(2)
    cached = pb.CachedFragment(digest="sha256:" + "a" * 64, bytes=500)
    hello = pb.Hello(
        protocol=1,
        device="a",
        budget_bytes=1500,
        floor_bytes=77,
        capabilities=pb.Capabilities(architecture="aarch64"),
        cached=[cached],
    )
    device = world.device("a", hello=hello)
    async with connected(device):
        await device.telemetry(used_bytes=11, peak_bytes=22, sent_bytes=33, fetched_bytes=44)
        await world.submit()
        await world.ended()
        response = await world.stub.ListDevices(api.ListDevicesRequest(), timeout=5)
    (status,) = response.devices
    assert (status.name, status.state, status.architecture) == ("a", 0, "aarch64")
    assert (status.budget_bytes, status.floor_bytes) == (1500, 77)
    assert (status.used_bytes, status.peak_bytes) == (11, 22)
    assert (status.sent_bytes, status.fetched_bytes) == (33, 44)
    # One fragment fits at a time, and three were used.
    assert (status.resident_bytes, len(status.resident)) == (1000, 1)
    assert status.loads >= 3
    assert status.evictions == status.loads - 1
    assert status.tasks == 6
    hits = status.tier_hits
    assert hits.resident + hits.cached + hits.idle + hits.evict == 6
    assert status.cached_fragments == 4
    assert status.cached_bytes == 500 + 3 * 800_000


async def test_fragments_are_served_from_any_offset(world: World) -> None:
    digest = world.document.fragments[0].digest
    content = (
        world.folder / "store/fragments" / digest.removeprefix("sha256:") / "model.onnx"
    ).read_bytes()
    client = SessionClient(world.channel)

    async def fetch(offset: int, name: str = "model.onnx", named: str = digest) -> bytes:
        request = FetchFragmentRequest(digest=named, file=name, offset=offset)
        receiver = FileReceiver(request, 1 << 24)
        frames = [frame async for frame in client.fetch_fragment(request, 10)]
        data = b"".join(bytes(receiver.feed(frame)) for frame in frames)
        assert receiver.complete
        return data

    assert await fetch(0) == content
    assert await fetch(len(content) - 1000) == content[-1000:]
    assert await fetch(len(content)) == b""
    assert (await refusal(fetch(len(content) + 1)))[0] == grpc.StatusCode.OUT_OF_RANGE
    missing = grpc.StatusCode.NOT_FOUND
    assert (await refusal(fetch(0, "../fragment.json")))[0] == missing
    assert (await refusal(fetch(0, named="sha256:../../etc")))[0] == missing
    assert (await refusal(fetch(0, named="sha256:" + "0" * 64)))[0] == missing


async def test_a_stream_that_is_no_frames_is_hung_up(world: World) -> None:
    device = world.device("a")
    client = SessionClient(world.channel)
    running = asyncio.create_task(device.run())
    await device.welcome
    call = client.exchange("a")
    await call.write(b"no frame at all")
    with pytest.raises(grpc.aio.AioRpcError, match="does not start with a header"):
        await call.read()
    assert (await refusal(running))[0] == grpc.StatusCode.ABORTED


async def test_a_message_beyond_the_limit_is_not_received(world: World) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    device = world.device("a")
    async with connected(device), grpc.aio.insecure_channel(world.target, unlimited) as channel:
        call = SessionClient(channel).exchange("a")
        await call.write(bytes(5 << 20))
        code, _ = await refusal(call.read())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_progress_and_counts_are_exposed(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a")):
        await world.submit()
        await world.ended()
    url = world.coordinator.metrics_url
    assert url is not None

    def get(path: str) -> str:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    assert await asyncio.to_thread(get, "/healthz") == "ok\n"
    assert await asyncio.to_thread(get, "/readyz") == "ok\n"
    text = await asyncio.to_thread(get, "/metrics")
    assert 'shoal_coordinator_tasks_total{tier="resident"}' in text
    assert "shoal_coordinator_step_seconds_bucket" in text
    assert "shoal_coordinator_task_compute_seconds_count 6.0" in text
