"""A device made of the real protocol and a dictionary of functions; and a model for it.

x ---> [0: a = 2x, early = -x] --a--> [1: b = a + 1] --b--> [2: y = a + b + x]
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shoal_protocol import PROTOCOL
from shoal_protocol.assembly import ActivationAssembler
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.digests import Digest
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import (
    TransferError,
    acknowledgement,
    frames_in,
    split_frame,
)
from shoal_protocol.partition import (
    MODEL,
    Edge,
    Fragment,
    PartitionDocument,
    TensorSpec,
    document_to_json,
)
from shoal_protocol.services import SessionClient
from shoal_protocol.tensors import ActivationKey, EncodedActivation, encode_activation
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import NONE, Acknowledgement, Codec

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long a machine that is busy with other tests may take for what is awaited."""
Arrays = Mapping[str, np.ndarray]
Stage = Callable[[Arrays], Arrays]

STAGES: tuple[Stage, ...] = (
    lambda t: {"a": 2 * t["x"], "early": -t["x"]},
    lambda t: {"b": t["a"] + 1},
    lambda t: {"y": t["a"] + t["b"] + t["x"]},
)


def whole_model(x: np.ndarray) -> Arrays:
    return {"early": -x, "y": 5 * x + 1}


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float", shape=(1, "n"))


def put_model(store: Path) -> PartitionDocument:
    """Write the model's three fragments into a store."""
    ports = ((("x",), ("a", "early")), (("a",), ("b",)), (("a", "b", "x"), ("y",)))
    fragments = []
    for index, (inputs, outputs) in enumerate(ports):
        content = f"stage {index} ".encode() * 100_000
        manifest = {
            "version": 1,
            "files": {
                "model.onnx": {
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "bytes": len(content),
                }
            },
        }
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(text).hexdigest()
        folder = store / "fragments" / digest
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_bytes(content)
        (folder / "fragment.json").write_bytes(text)
        fragments.append(
            Fragment(
                index=index,
                digest=Digest(f"sha256:{digest}"),
                nodes=1,
                weight_bytes=0,
                resident_bytes=1000,
                least_bytes=1000,
                activation_bytes=None,
                flops=None,
                inputs=tuple(map(tensor, inputs)),
                outputs=tuple(map(tensor, outputs)),
            )
        )
    edges = (
        (MODEL, 0, ("x",)),
        (MODEL, 2, ("x",)),
        (0, 1, ("a",)),
        (0, 2, ("a",)),
        (0, MODEL, ("early",)),
        (1, 2, ("b",)),
        (2, MODEL, ("y",)),
    )
    return PartitionDocument(
        model_digest=Digest("sha256:" + "0" * 64),
        fragments=tuple(fragments),
        edges=tuple(
            Edge(producer=producer, consumer=consumer, tensors=tensors, bytes_per_item=None)
            for producer, consumer, tensors in edges
        ),
        inputs=(tensor("x"),),
        outputs=(tensor("early"), tensor("y")),
    )


def submission(
    document: PartitionDocument, inputs: Path, outputs: Path, **fields: object
) -> api.SubmitJobRequest:
    return api.SubmitJobRequest(
        **{  # type: ignore[arg-type]
            "name": "job",
            "partition": document_to_json(document).encode(),
            "inputs_uri": str(inputs),
            "outputs_uri": str(outputs),
            **fields,
        }
    )


class ScriptedDevice:
    """One session, from `run` to its cancellation. `given` are the items and stages of its tasks,
    `executed` those that it ran."""

    def __init__(  # noqa: PLR0913
        self,
        target: str,
        name: str,
        document: PartitionDocument,
        *,
        stages: tuple[Stage, ...] = STAGES,
        budget: int = 10_000,
        gate: asyncio.Semaphore | None = None,
        hello: pb.Hello | None = None,
        frame_bytes: int = 256,
        credentials: Credentials | None = None,
        server_name: str | None = None,
    ) -> None:
        """`gate` has one permit for each task that may run; None: all may."""
        self.name = name
        self.executed: list[tuple[int, int]] = []
        self.given: list[tuple[int, int]] = []
        self.welcome: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        self.gate = gate
        self.inline_inputs = 0
        """Tasks whose inputs came with their message."""
        self.bulk_transfers = 0
        """Inputs that came, and results that went, on the bulk stream."""
        self.spoil: Callable[[bytes], bytes] = lambda frame: frame
        """Changes the results that go with a reply."""
        self.cancels = True
        """If not set, a task that is cancelled runs to its end, like a node in ONNX Runtime."""
        self.deaf = False
        """If set, the device answers nothing any more."""
        self.hello = hello or pb.Hello(
            protocol=PROTOCOL, device=name, incarnation=1, budget_bytes=budget, floor_bytes=77
        )
        self._frame_bytes = frame_bytes
        self._credentials = credentials
        self._server_name = server_name
        self._target = target
        self._document = document
        self._stage_of = {f.digest: s for f, s in zip(document.fragments, stages, strict=True)}
        self._numbers = count(1)
        self._acks: dict[int, asyncio.Future[Acknowledgement]] = {}
        self._tensors: dict[tuple[int, str, str, int], np.ndarray] = {}
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._speaking = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until the coordinator ends the session: raises `grpc.aio.AioRpcError`."""
        name = self._server_name
        async with open_channel(self._target, self._credentials, server_name=name) as channel:
            client = SessionClient(channel)
            self._control = client.connect()
            await self._control.write(pb.AgentMessage(hello=self.hello))
            first = await self._control.read()
            if first is grpc.aio.EOF:
                await self._fail()
            assert isinstance(first, pb.CoordinatorMessage)
            self.welcome.set_result(first.welcome)
            self._bulk = client.exchange(self.name)
            reader = asyncio.create_task(self._read_bulk())
            reader.add_done_callback(lambda _: self._control.cancel())
            try:
                while isinstance(message := await self._control.read(), pb.CoordinatorMessage):
                    for each in message.batch.messages or (message,):
                        if not self.deaf:
                            await self._receive(each)
            finally:
                reader.cancel()
                for task in list(self._tasks.values()):
                    task.cancel()
                await asyncio.gather(reader, *self._tasks.values(), return_exceptions=True)
            await self._fail()

    async def _write(self, *frames: bytes) -> None:
        async with self._turn:
            for frame in frames:
                await self._bulk.write(frame)

    async def say(self, message: pb.AgentMessage) -> None:
        async with self._speaking:
            await self._control.write(message)

    async def _fail(self) -> None:
        raise grpc.aio.AioRpcError(
            await self._control.code(),
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details=await self._control.details(),
        )

    async def telemetry(self, **readings: Any) -> None:
        await self.say(pb.AgentMessage(telemetry=pb.Telemetry(**readings)))

    async def drain(self) -> None:
        """Report that the device is draining."""
        await self.say(pb.AgentMessage(draining=pb.Draining()))

    async def _reply(self, instruction: int, **outcome: object) -> None:
        if self.deaf:
            return
        reply = pb.Reply(instruction=instruction, **outcome)  # type: ignore[arg-type]
        with contextlib.suppress(asyncio.InvalidStateError):
            # A cancellation that comes now is too late: this is the one answer.
            await asyncio.shield(self.say(pb.AgentMessage(reply=reply)))

    async def _receive(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "load":
                await self._reply(message.load.instruction, loaded=pb.Loaded(resident_bytes=999))
            case "unload":
                await self._reply(message.unload.instruction, unloaded=pb.Unloaded())
            case "prefetch":
                await self._reply(message.prefetch.instruction, prefetched=pb.Prefetched())
            case "probe":
                answer = pb.ProbeReply(nonce=message.probe.nonce)
                await self.say(pb.AgentMessage(probe_reply=answer))
            case "execute":
                number = message.execute.instruction
                self._tasks[number] = asyncio.create_task(self._execute(message.execute))
                # A task that is cancelled before it begins would never answer.
                await asyncio.sleep(0)
            case "forward":
                number = message.forward.instruction
                self._tasks[number] = asyncio.create_task(self._forward(message.forward))
                await asyncio.sleep(0)
            case "cancel" if self.cancels and message.cancel.instruction in self._tasks:
                self._tasks[message.cancel.instruction].cancel()
            case _:
                pass

    async def _execute(self, order: pb.Execute) -> None:
        task = order.task
        self.given.append((task.item, task.stage))
        keys = [
            (task.item, name, task.job, int(task.epoch))
            for source in order.inputs
            for name in source.tensors
        ]
        try:
            if order.input_frame:
                self.inline_inputs += 1
                inputs = ActivationAssembler().feed(order.input_frame)
                assert inputs is not None
                assert inputs.device == self.name
                await self._store(task, inputs.tensors)
            async with self._changed:
                await self._changed.wait_for(lambda: all(key in self._tensors for key in keys))
            if self.gate is not None:
                await self.gate.acquire()
            made = self._stage_of[Digest(order.digest)]({k[1]: self._tensors[k] for k in keys})
            self.executed.append((task.item, task.stage))
            await self._store(task, made)
            delivered = []
            for route in order.routes:
                assert not route.address
                if await self._send(task, route.consumer, route.device, route.tensors):
                    delivered.append(route.consumer)
            frame = b""
            if order.results and sum(made[n].nbytes for n in order.results) <= order.reply_bytes:
                (frame,) = self._encode(task, MODEL, "", order.results, 0)
            elif order.results:
                self.bulk_transfers += 1
                assert await self._send(task, MODEL, "", order.results), "a result was refused"
        except asyncio.CancelledError:
            await self._reply(order.instruction, failure=pb.Failure(code=pb.CANCELLED))
            raise
        except Exception as error:
            failure = pb.Failure(code=pb.RUNTIME, message=str(error))
            await self._reply(order.instruction, failure=failure)
        else:
            executed = pb.Executed(
                compute_seconds=0.001, delivered=delivered, result_frame=self.spoil(frame)
            )
            await self._reply(order.instruction, executed=executed)

    async def _store(self, task: pb.Task, tensors: Arrays) -> None:
        async with self._changed:
            for name, array in tensors.items():
                self._tensors[task.item, name, task.job, int(task.epoch)] = array
            self._changed.notify_all()

    async def _forward(self, order: pb.Forward) -> None:
        route = order.route
        if await self._send(order.task, route.consumer, route.device, route.tensors):
            await self._reply(order.instruction, forwarded=pb.Forwarded())
        else:
            failure = pb.Failure(code=pb.UNREACHABLE, message="not taken")
            await self._reply(order.instruction, failure=failure)

    async def _send(self, task: pb.Task, consumer: int, device: str, names: Sequence[str]) -> bool:
        if device == self.name:
            return True
        number = next(self._numbers)
        answered = self._acks[number] = asyncio.get_running_loop().create_future()
        await self._write(*self._encode(task, consumer, device, names, number))
        answer = await answered
        return bool(answer.outcome == Acknowledgement.ACCEPTED)

    async def send_as(
        self, key: ActivationKey, device: str, tensors: Arrays, codec: Codec = NONE
    ) -> Acknowledgement:
        """Send tensors under any key; the answer."""
        return await self.send(encode_activation(key, device, tensors, transfer=0, codec=codec))

    async def send(self, activation: EncodedActivation) -> Acknowledgement:
        """Send it as the next transfer; the answer."""
        number = activation.header.transfer = next(self._numbers)
        answered = self._acks[number] = asyncio.get_running_loop().create_future()
        await self._write(*activation)
        return await asyncio.wait_for(answered, PATIENCE_SECONDS)

    def _encode(
        self, task: pb.Task, consumer: int, device: str, names: Iterable[str], number: int
    ) -> Iterable[bytes]:
        return encode_activation(
            ActivationKey(
                job=task.job,
                epoch=task.epoch,
                item=task.item,
                producer=task.stage,
                consumer=consumer,
            ),
            device,
            {name: self._tensors[task.item, name, task.job, int(task.epoch)] for name in names},
            transfer=number,
            frame_bytes=self._frame_bytes if number else MAXIMUM_PAYLOAD_BYTES,
        )

    async def _take_frame(self, frame: bytes) -> bool:
        """Whether a frame is one that devices of another kind take."""
        return False

    async def _read_bulk(self) -> None:
        assembler = ActivationAssembler()
        async for frame in each_frame(self._bulk):
            if await self._take_frame(frame):
                continue
            header, payload = split_frame(frame)
            if header.WhichOneof("kind") == "acknowledgement":
                answered = self._acks.pop(header.transfer)
                if not answered.done():
                    answered.set_result(header.acknowledgement)
                continue
            try:
                received = assembler.add(header, payload)
            except TransferError as error:
                await self._write(bytes(acknowledgement(header.transfer, error.outcome)))
                continue
            if received is not None:
                key = received.key
                self.bulk_transfers += key.producer == MODEL
                await self._store(
                    pb.Task(job=key.job, epoch=key.epoch, item=key.item), received.tensors
                )
                await self._write(bytes(acknowledgement(header.transfer)))


async def each_frame(messages: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for message in messages:
        for frame in frames_in(message):
            yield frame


@contextlib.asynccontextmanager
async def connected(*devices: ScriptedDevice) -> AsyncIterator[None]:
    """The devices' sessions, for as long as the context lasts."""
    tasks = [asyncio.create_task(device.run()) for device in devices]
    try:
        for device in devices:
            await asyncio.wait_for(asyncio.shield(device.welcome), PATIENCE_SECONDS)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                logger.error("a device's session ended: %r", result, exc_info=result)
