"""A device with a valid certificate attacks a real pool: the jobs of others complete, unchanged.

The pool is a coordinator process and two agent processes over TLS. The attacker speaks the protocol
from the test: it sends what no agent would send.
"""

import asyncio
import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from pool import cut

from certificates import Pki
from coordinator.scripted import Arrays, ScriptedDevice, Stage, connected, submission
from coordinator.test_fetching import put_fragment
from made_models import TOPOLOGIES
from parity_with_whole import TOLERANCE, whole
from protocol.item_frames import one_item
from shoal_cluster.ports import lasting_port
from shoal_protocol.channels import open_channel
from shoal_protocol.coordinator_client import ENDED, CoordinatorClient
from shoal_protocol.frames import split_frame
from shoal_protocol.pacing import BATCHED_MESSAGES
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.services import FrameStream, PeerClient, SessionClient
from shoal_protocol.tensors import ActivationKey, EncodedActivation, encode_activation
from shoal_protocol.transfers import STALL_SECONDS
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import files_pb2 as files
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.files_pb2_grpc import FilesStub
from shoal_protocol.v1.tensors_pb2 import (
    FLOAT,
    ZSTD,
    Acknowledgement,
    FetchFragmentRequest,
    FrameHeader,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MADE = TOPOLOGIES["an output that is used on"]
FIRST_RESULT, BETWEEN, LAST_RESULT = (0, MODEL, "mid"), (0, 1, "mid"), (1, MODEL, "y")
"""The edges after the first stage: producer, consumer, tensor."""
AGENTS = ("one", "two")
ITEMS = 40
PATIENCE_SECONDS = 60.0
FORGED = np.full((2, 16), 666, np.float32)
COORDINATOR_BYTES = 128 << 20
"""The most memory that the coordinator's process may take: twice what it takes unattacked."""


@dataclass
class Pool:
    """A coordinator and two agents as processes, and a model of two fragments in their store."""

    folder: Path
    pki: Pki
    document: PartitionDocument
    ports: dict[str, int]
    processes: dict[str, asyncio.subprocess.Process]
    client: CoordinatorClient

    def channel(self, name: str, to: str = "coordinator") -> grpc.aio.Channel:
        return open_channel(f"localhost:{self.ports[to]}", self.pki.issue(name))

    def attacker(
        self,
        *,
        budget: int = 1,
        stages: tuple[Stage, ...] = 2 * (dict,),
        gate: asyncio.Semaphore | None = None,
    ) -> ScriptedDevice:
        """A device that is given no task, unless its budget has room for a fragment."""
        return ScriptedDevice(
            f"localhost:{self.ports['coordinator']}",
            "attacker",
            self.document,
            stages=stages,
            budget=budget,
            gate=gate,
            credentials=self.pki.issue("attacker"),
        )

    async def submit(self, homes: Sequence[str] = AGENTS, **fields: object) -> api.JobStatus:
        """A job with a stage on each of `homes`."""
        stages = [api.StagePlacement(devices=[name]) for name in homes]
        return await self.client.submit(
            submission(
                self.document,
                self.folder / "in",
                self.folder / "out",
                **{"stages": stages, "backoff_limit": 3, **fields},
            )
        )

    async def load_the_fragments(self) -> None:
        """Run a job before the one that counts, so that this one's tasks are given at once."""
        await self.submit(name="earlier", outputs_uri=str(self.folder / "earlier"))
        assert (await self.until(lambda _: False, "earlier")).state == api.JobStatus.COMPLETE

    async def until(
        self, reached: Callable[[api.JobStatus], bool], name: str = "job"
    ) -> api.JobStatus:
        """The first status that is as wanted, or the job's last."""
        async for status in self.client.watch(name, 0.05, seconds=PATIENCE_SECONDS):
            if reached(status) or status.state in ENDED:
                return status
        raise AssertionError(f"no status of {name}")

    async def until_running(self, stage: int) -> None:
        """Until some task of the job's stage is at a device."""
        status = await self.until(lambda status: status.stages[stage].running > 0)
        assert status.state == api.JobStatus.RUNNING, status

    async def check_that_the_job_completes(self, results: Path | None = None) -> None:
        """Every item has the result that the whole model gives."""
        status = await self.until(lambda _: False)
        assert status.state == api.JobStatus.COMPLETE, status
        with np.load((results or self.folder / "out") / "0.npz") as made:
            given = dict(made)
        expected = whole(MADE.save(self.folder), [MADE.inputs(seed) for seed in range(ITEMS)])
        for name in ("mid", "y"):
            honest = [item[name] for item in expected]
            np.testing.assert_allclose(given[name], honest, atol=TOLERANCE)

    def coordinator_peak_bytes(self) -> int:
        """The most memory that the coordinator's process has had at once."""
        text = Path(f"/proc/{self.processes['coordinator'].pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) << 10

    async def until_the_coordinator_rests(self) -> None:
        """Until it uses less than a fifth of a processor."""
        stat = Path(f"/proc/{self.processes['coordinator'].pid}/stat")
        used, before = 0, -100
        async with asyncio.timeout(PATIENCE_SECONDS):
            while used - before > 10:
                await asyncio.sleep(0.5)
                before, used = used, sum(map(int, stat.read_text().rsplit(")")[-1].split()[11:13]))

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """An agent that keeps its tasks unanswered as long as the block runs."""
        process = self.processes[name]
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def process(*command: object) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *map(str, command), "--exit-with-parent")
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


def tls(pki: Pki, name: str) -> tuple[object, ...]:
    own = pki.issue(name)
    return ("--tls-ca", own.ca, "--tls-certificate", own.certificate, "--tls-key", own.key)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    pki, store = Pki(tmp_path / "pki"), tmp_path / "store"
    document = cut(MADE.save(tmp_path), store, ("mid",), MADE.shapes)
    (tmp_path / "in").mkdir()
    rows = np.stack([MADE.inputs(seed)["x"] for seed in range(ITEMS)])
    np.savez(tmp_path / "in" / "0.npz", x=rows)
    ports = {name: lasting_port() for name in ("coordinator", *AGENTS)}
    target = f"localhost:{ports['coordinator']}"
    commands: dict[str, tuple[object, ...]] = {
        "coordinator": (
            *("shoal_coordinator", "--listen", target, "--store", store),
            *("--silence-seconds", 60, *tls(pki, "shelf-coordinator")),
        )
    } | {
        name: (
            *("shoal_agent", "--name", name, "--budget", "64Mi", "--threads", 1),
            *("--speed", os.devnull),  # to measure takes a second
            *("--cache", tmp_path / f"cache-{name}", "--coordinator", target),
            *("--listen", f"127.0.0.1:{ports[name]}", *tls(pki, name)),
        )
        for name in AGENTS
    }
    async with contextlib.AsyncExitStack() as stack:
        processes = {
            name: await stack.enter_async_context(process(*command))
            for name, command in commands.items()
        }
        client = CoordinatorClient(
            open_channel(target, pki.issue("shoal")), seconds=PATIENCE_SECONDS, wait=True
        )
        stack.push_async_callback(client.close)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(await client.devices()) < len(AGENTS):
                await asyncio.sleep(0.05)
        yield Pool(tmp_path, pki, document, ports, processes, client)


def forgery(
    epoch: int, item: int, edge: tuple[int, int, str], device: str = ""
) -> EncodedActivation:
    """What a stage makes of an item, as the attacker would have it."""
    producer, consumer, tensor = edge
    key = ActivationKey(job="job", epoch=epoch, item=item, producer=producer, consumer=consumer)
    return encode_activation(key, device, {tensor: FORGED}, transfer=1 + item)


async def forge_to_the_coordinator(attacker: ScriptedDevice, epoch: int) -> None:
    """Results and relayed activations of every item, and replies; none is taken."""
    for item in range(ITEMS):
        for activation in (
            forgery(epoch, item, FIRST_RESULT),
            forgery(epoch, item, LAST_RESULT),
            forgery(epoch, item, BETWEEN, "two"),
        ):
            answer = await attacker.send(activation)
            assert answer.outcome == Acknowledgement.STALE, answer
    for instruction in range(5 * ITEMS):
        (frame,) = forgery(epoch, instruction % ITEMS, FIRST_RESULT)
        executed = pb.Executed(compute_seconds=0.001, delivered=[1], result_frame=frame)
        reply = pb.Reply(instruction=instruction, executed=executed)
        await attacker.say(pb.AgentMessage(reply=reply))


async def forge_to_an_agent(push: FrameStream, epoch: int) -> None:
    """Activations of every item, straight to the agent that needs them, and items on their way,
    with guessed tickets."""
    for item in range(ITEMS):
        await push.write(one_item(os.urandom(16), item, (1,), {"mid": FORGED}))
        activation = forgery(epoch, item, BETWEEN, "two")
        activation.header.activation.ticket = os.urandom(16)
        for frame in activation:
            await push.write(frame)
    for _ in range(ITEMS):
        message = await push.read()
        assert isinstance(message, bytes)
        header, _ = split_frame(message)
        assert header.acknowledgement.outcome != Acknowledgement.ACCEPTED


async def test_what_a_device_without_a_task_forges_reaches_no_result(pool: Pool) -> None:
    """The agent that has the first tasks answers them only when all forgeries have arrived."""
    await pool.load_the_fragments()
    attacker = pool.attacker()
    async with connected(attacker), pool.channel("attacker", to="two") as peer:
        with pool.frozen("one"):
            epoch = (await pool.submit()).epoch
            await pool.until_running(stage=0)
            await forge_to_the_coordinator(attacker, epoch)
            await forge_to_an_agent(PeerClient(peer).push(), epoch)
        await pool.check_that_the_job_completes()
    assert not attacker.executed


async def test_a_job_completes_beside_64_fetches_that_nobody_reads(pool: Pool) -> None:
    """Agents fetch the job's fragments before the attacker's streams are given up."""
    wanted = FetchFragmentRequest(digest=put_fragment(pool.folder / "store"), file="model.onnx")
    async with pool.channel("attacker") as channel:
        client = SessionClient(channel)
        unread = [client.fetch_fragment(wanted, timeout=PATIENCE_SECONDS) for _ in range(64)]
        served = [asyncio.create_task(call.initial_metadata()) for call in unread]
        await asyncio.wait(served, return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(0.9 * STALL_SECONDS):
            await pool.submit()
            await pool.check_that_the_job_completes()
        for call in unread:
            call.cancel()
        await asyncio.gather(*served, return_exceptions=True)


@pytest.mark.minutes
async def test_a_job_completes_whose_inputs_are_uploaded_beside_32_silent_uploads(
    pool: Pool,
) -> None:
    async with pool.channel("shoal-worker") as channel:
        silent = [await silent_upload(channel, number) for number in range(32)]
        await upload_inputs(pool)
        await pool.submit(inputs_uri="", outputs_uri="")
        await pool.check_that_the_job_completes(pool.folder / "store" / "jobs" / "job" / "out")
        for call in silent:
            call.cancel()


async def silent_upload(
    channel: grpc.aio.Channel, number: int
) -> "grpc.aio.StreamStreamCall[files.PutRequest, files.PutAnswer]":
    """An upload that has its turn, and sends nothing of its file."""
    call = FilesStub(channel).Put(timeout=PATIENCE_SECONDS)
    header = files.PutHeader(path=f"jobs/silent-{number}/in/0.npz", bytes=1 << 20)
    await call.write(files.PutRequest(header=header))
    answer = await call.read()
    assert isinstance(answer, files.PutAnswer)
    assert answer.WhichOneof("message") == "offset"
    return call


async def upload_inputs(pool: Pool) -> None:
    content = (pool.folder / "in" / "0.npz").read_bytes()

    async def read(offset: int) -> AsyncIterator[bytes]:
        yield content[offset:]

    worker = CoordinatorClient(pool.channel("shoal-worker"), seconds=PATIENCE_SECONDS, wait=True)
    header = files.PutHeader(path="jobs/job/in/0.npz", bytes=len(content))
    assert await worker.put_file(header, read, lambda sent: None)
    await worker.close()


@functools.cache
def zeros() -> EncodedActivation:
    """1 GiB of them, in 33 KB."""
    key = ActivationKey(job="", epoch=0, item=0, producer=0, consumer=0)
    zeros = np.zeros(1 << 30, np.uint8)
    return encode_activation(key, "", {"y": zeros}, transfer=0, codec=ZSTD)


def bomb(key: ActivationKey, shape: tuple[int, ...]) -> EncodedActivation:
    """33 KB that declare this shape, and decode to 1 GiB: the header says so, or it lies."""
    header = FrameHeader.FromString(zeros().header.SerializeToString())
    key.write(header.activation.key)
    activation = replace(zeros(), header=header)
    (tensor,) = activation.header.activation.tensors
    tensor.dtype, tensor.shape[:] = FLOAT, shape
    tensor.decoded_bytes = 4 * math.prod(shape)
    assert activation.encoded_bytes < 40_000
    return activation


@pytest.mark.parametrize(
    "shape", [(1 << 24, 16), pytest.param((1 << 12, 16), marks=pytest.mark.minutes)]
)
async def test_a_result_bomb_is_refused_before_it_takes_memory(
    pool: Pool, shape: tuple[int, ...]
) -> None:
    """It comes from the device that has the task, on the bulk stream and with a reply."""
    gate = asyncio.Semaphore(0)
    attacker = pool.attacker(budget=64 << 20, stages=(dict, second_half), gate=gate)
    bombs = 3

    def first_bombs(frame: bytes) -> bytes:
        nonlocal bombs
        bombs -= 1
        header, _ = split_frame(frame)
        (spoiled,) = bomb(ActivationKey.of(header.activation.key), shape)
        return frame if bombs < 0 else spoiled

    attacker.spoil = first_bombs
    async with connected(attacker):
        epoch = (await pool.submit(homes=("one", "attacker"))).epoch
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not attacker.given:
                await asyncio.sleep(0.01)
        item, stage = attacker.given[0]
        key = ActivationKey(job="job", epoch=epoch, item=item, producer=stage, consumer=MODEL)
        answer = await attacker.send(bomb(key, shape))
        assert answer.outcome == Acknowledgement.REFUSED, answer
        for _ in range(3 * ITEMS):
            gate.release()
        await pool.check_that_the_job_completes()
    assert bombs < 0
    assert pool.coordinator_peak_bytes() < COORDINATOR_BYTES


def second_half(tensors: Arrays) -> Arrays:
    return {"y": np.tanh(tensors["mid"] @ MADE.weights["W2"])}


async def test_a_flood_of_telemetry_holds_up_neither_clients_nor_jobs(pool: Pool) -> None:
    """What the coordinator does not read of it waits at the attacker."""
    attacker = pool.attacker()
    absurd = pb.AgentMessage(telemetry=pb.Telemetry(cpu_fraction=1e308))
    batch = pb.AgentMessage(batch=pb.AgentBatch(messages=BATCHED_MESSAGES * [absurd]))

    async def flood() -> None:
        while True:
            await attacker.say(batch)

    async with connected(attacker):
        flooding = asyncio.create_task(flood())
        await pool.until_the_coordinator_rests()
        await pool.submit()
        for _ in range(100):
            devices = await pool.client.devices(seconds=10)
            assert {device.name for device in devices} == {"attacker", *AGENTS}
        await pool.check_that_the_job_completes()
        assert not flooding.done(), "the attack has lasted as long as the job"
        flooding.cancel()
