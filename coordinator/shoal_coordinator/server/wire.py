"""Between the protocol's messages and the dispatcher's values, both addresses. No IO, no state.

Numbers and texts from the wire were not checked by anybody before: what cannot be is refused with
`Malformed`, and every enum has a value for what this version does not know.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server.carrying import is_light
from shoal_coordinator.storage.volume_paths import LONGEST_JOB, is_job
from shoal_protocol import PROTOCOL
from shoal_protocol.choices import LARGEST_BATCH
from shoal_protocol.digests import Digest, is_digest
from shoal_protocol.fragment_store import MAXIMUM_LISTED
from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.partition import MODEL, Fragment, PartitionDocument, TensorSpec
from shoal_protocol.seen_sizes import read_sizes
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.tickets import make_ticket
from shoal_protocol.units import Bytes, Nanoseconds, nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_TEXT: Final = 2000
MOST_RETRIED: Final = 100_000
"""Failed items that a request may name."""
_LONGEST_SECONDS: Final = 10.0**9
_LARGEST_BYTES: Final = 1 << 50


class Malformed(ValueError):
    """A message that no peer of ours would send; the text says what is wrong with it."""


# ---- from devices --------------------------------------------------------------------------------


def check_hello(hello: pb.Hello) -> None:
    """Raise `Malformed` for a Hello that cannot open a session."""
    if hello.protocol != PROTOCOL:
        raise Malformed(
            f"speaks protocol {hello.protocol}; this coordinator speaks {PROTOCOL}: "
            f"install the same version of Shoal on both sides"
        )
    if not is_device(hello.device):
        raise Malformed(f"{hello.device[:70]!r} is no DNS label, such as pi-4")
    if not 0 < hello.budget_bytes <= _LARGEST_BYTES:
        raise Malformed(f"device {hello.device} has a budget of {hello.budget_bytes} bytes")
    if max(len(hello.cached), len(hello.resident)) > MAXIMUM_LISTED:
        raise Malformed(f"device {hello.device} lists more than {MAXIMUM_LISTED} fragments")
    if max(len(hello.address), len(hello.version), len(hello.capabilities.architecture)) > 512:
        raise Malformed(f"device {hello.device} has an address or a version of absurd length")
    for digest in (*(c.digest for c in hello.cached), *(r.digest for r in hello.resident)):
        digest_of(digest)
    sizes = (*(c.bytes for c in hello.cached), *(r.resident_bytes for r in hello.resident))
    if max(sizes, default=0) > _LARGEST_BYTES:
        raise Malformed(f"device {hello.device} has a fragment of {max(sizes)} bytes")


def is_device(name: str) -> bool:
    """Whether a device can have this name."""
    return _LABEL.fullmatch(name) is not None


def digest_of(text: str) -> Digest:
    """A digest from the wire; `Malformed` if it is none."""
    if not is_digest(text):
        raise Malformed(f"{text[:80]!r} is no digest")
    return Digest(text)


def device_joined(hello: pb.Hello, session: int, at: Nanoseconds) -> ev.DeviceJoined:
    """The event of a session that a checked Hello opens."""
    return ev.DeviceJoined(
        at=at,
        device=hello.device,
        session=session,
        incarnation=hello.incarnation,
        budget=Bytes(hello.budget_bytes),
        single=hello.residency == pb.SINGLE,
        resident={Digest(each.digest): Bytes(each.resident_bytes) for each in hello.resident},
        cached=frozenset(Digest(each.digest) for each in hello.cached),
    )


def telemetry_of(message: pb.Telemetry) -> ev.Telemetry:
    """Readings; one that is absent, not a number, or none that a device can have is unknown."""
    memory = None
    if message.HasField("memory_available_bytes"):
        memory = size(message.memory_available_bytes)
    round_trip = _reading(message, "round_trip_seconds", 0, _LONGEST_SECONDS)
    return ev.Telemetry(
        cpu_fraction=_reading(message, "cpu_fraction", 0, 1),
        memory_available=memory,
        temperature_celsius=_reading(message, "temperature_celsius", -100, 1000),
        battery_fraction=_reading(message, "battery_fraction", 0, 1),
        round_trip=None if round_trip is None else nanoseconds(round_trip),
    )


def _reading(message: pb.Telemetry, name: str, least: float, most: float) -> float | None:
    value = getattr(message, name)
    return value if message.HasField(name) and least <= value <= most else None


def size(number: int) -> Bytes:
    """Bytes from the wire: no device has more than `_LARGEST_BYTES` of anything."""
    return Bytes(min(number, _LARGEST_BYTES))


def duration(seconds: float) -> Nanoseconds:
    """Seconds from the wire; what is not a sane duration is 0."""
    return nanoseconds(seconds if 0 <= seconds < _LONGEST_SECONDS else 0)


def answer(  # noqa: PLR0911 - one for each kind
    reply: pb.Reply, to: "Answerable", device: str, at: Nanoseconds
) -> ev.Event:
    """The event of a device's reply to an instruction; one of the wrong kind is a failure."""
    number = reply.instruction
    match reply.WhichOneof("outcome"), to:
        case "loaded", ins.Load():
            held = size(reply.loaded.resident_bytes)
            gone = frozenset(map(digest_of, reply.loaded.dropped[:MAXIMUM_LISTED]))
            return ev.FragmentResident(at=at, instruction=number, resident=held, dropped=gone)
        case "unloaded", ins.Unload():
            return ev.FragmentUnloaded(at=at, instruction=number)
        case "prefetched", ins.Prefetch():
            gone = frozenset(map(digest_of, reply.prefetched.dropped[:MAXIMUM_LISTED]))
            return ev.FragmentCached(at=at, instruction=number, dropped=gone)
        case "planned", ins.Plan():
            return ev.LegPlanned(at=at, instruction=number)
        case "executed", ins.Execute():
            return ev.TaskFinished(
                at=at,
                instruction=number,
                compute=duration(reply.executed.compute_seconds),
                delivered=tuple(reply.executed.delivered[:MAXIMUM_LISTED]),
                resident=size(reply.executed.resident_bytes),
            )
        case "forwarded", ins.Forward():
            return ev.ActivationForwarded(at=at, instruction=number)
        case "failure", _:
            return ev.InstructionFailed(
                at=at, instruction=number, failure=failure_of(reply.failure, device)
            )
        case other, _:
            failure = ev.Failure(
                kind=ev.FailureKind.RUNTIME, message=f"answered {type(to).__name__} with {other}"
            )
            return ev.InstructionFailed(at=at, instruction=number, failure=failure)


_KINDS: Final = {
    code: ev.FailureKind[name]
    for name, code in pb.FailureCode.items()
    if name in ev.FailureKind.__members__
}


def failure_of(message: pb.Failure, device: str) -> ev.Failure:
    """A device's failure; one of a code that is not known counts as the runtime's."""
    kind = _KINDS.get(message.code, ev.FailureKind.RUNTIME)
    kinds = (ev.FailureKind.BUDGET, ev.FailureKind.DISK_FULL)
    stated = kind in kinds and message.need_bytes > 0
    return ev.Failure(
        kind=kind,
        message=message.message[:_TEXT],
        need=size(message.need_bytes) if stated else None,
        have=size(message.have_bytes) if stated else None,
        device=device,
        seen=read_sizes(message.seen) if stated else {},
    )


# ---- to devices ----------------------------------------------------------------------------------

Answerable = (
    ins.Load | ins.Unload | ins.Prefetch | ins.Execute | ins.Forward | ins.Plan | ins.Travel
)
"""Instructions that a device answers."""


class Address(NamedTuple):
    """How peers reach a device: its gRPC target, and the key of its tickets."""

    target: str
    ticket_key: bytes


Addresses = Callable[[str], Address | None]
"""The address of a device; None: through the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWires:
    """What a stage's messages say about its tensors; the same for every item. `execute` has what
    every Execute has: copying it takes a third of the time of making another."""

    execute: pb.Execute
    results: tuple[str, ...]
    outgoing: Mapping[int, tuple[str, ...]]
    model_inputs: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    """What the stage makes."""


def stage_wires(document: PartitionDocument, batch: int) -> tuple[StageWires, ...]:
    """The wiring of every stage of a partition; `batch` is that of the job."""
    wires: list[StageWires] = []
    for index in range(len(document.fragments)):
        into, out = document.into(index), document.out_of(index)
        later = {edge.consumer: edge.tensors for edge in out if edge.consumer != MODEL}
        results = tuple(name for e in out if e.consumer == MODEL for name in e.tensors)
        wires.append(
            StageWires(
                execute=pb.Execute(
                    inputs=[
                        pb.InputSource(producer=edge.producer, tensors=edge.tensors)
                        for edge in into
                    ],
                    results=results,
                    kept=dict.fromkeys(name for names in later.values() for name in names),
                    reply_bytes=INLINE_BYTES if results else 0,
                    batch=batch if document.fragments[index].batches else 0,
                ),
                results=results,
                outgoing=later,
                model_inputs=tuple(n for e in into if e.producer == MODEL for n in e.tensors),
                specs={spec.name: spec for spec in document.fragments[index].outputs},
            )
        )
    return tuple(wires)


def load_message(order: ins.Load, peers: tuple[str, ...]) -> pb.CoordinatorMessage:
    number, digest, size = order.instruction, order.digest, order.granted
    load = pb.Load(
        instruction=number,
        digest=digest,
        resident_bytes=size,
        peers=peers,
        priority=order.priority,
    )
    return pb.CoordinatorMessage(load=load)


def unload_message(order: ins.Unload) -> pb.CoordinatorMessage:
    unload = pb.Unload(instruction=order.instruction, digest=order.digest)
    return pb.CoordinatorMessage(unload=unload)


def prefetch_message(order: ins.Prefetch, peers: tuple[str, ...]) -> pb.CoordinatorMessage:
    prefetch = pb.Prefetch(instruction=order.instruction, digest=order.digest, peers=peers)
    return pb.CoordinatorMessage(prefetch=prefetch)


def execute_message(
    order: ins.Execute,
    wires: StageWires,
    addresses: Addresses,
    *,
    deadline_seconds: float,
    lossy: bool,
    input_frame: bytes,
) -> pb.CoordinatorMessage:
    """`input_frame` holds the model's inputs, where they go with the message; else it is empty."""
    message = pb.CoordinatorMessage()
    execute = message.execute
    execute.CopyFrom(wires.execute)
    execute.instruction = order.instruction
    execute.digest = order.digest
    execute.deadline_seconds = deadline_seconds
    execute.lossy = lossy
    execute.input_frame = input_frame
    task = execute.task
    task.job, task.epoch, task.item, task.stage = order.job, order.epoch, order.item, order.stage
    for consumer, device in order.routes:
        _write_route(execute.routes.add(), task, consumer, device, wires, addresses)
    return message


def forward_message(
    order: ins.Forward, wires: StageWires, addresses: Addresses, *, lossy: bool
) -> pb.CoordinatorMessage:
    """`wires` are the producer's."""
    task = pb.Task(job=order.job, epoch=order.epoch, item=order.item, stage=order.producer)
    forward = pb.Forward(instruction=order.instruction, task=task, lossy=lossy)
    _write_route(forward.route, task, order.consumer, order.target, wires, addresses)
    return pb.CoordinatorMessage(forward=forward)


def _write_route(
    route: pb.Route,
    task: pb.Task,
    consumer: int,
    device: str,
    wires: StageWires,
    addresses: Addresses,
) -> None:
    route.consumer = consumer
    route.device = device
    route.tensors.extend(wires.outgoing[consumer])
    if (found := addresses(device)) is not None:
        key = ActivationKey(
            job=task.job, epoch=task.epoch, item=task.item, producer=task.stage, consumer=consumer
        )
        route.address = found.target
        route.ticket = make_ticket(found.ticket_key, key)


def release_message(orders: Iterable[ins.Release]) -> pb.CoordinatorMessage:
    message = pb.CoordinatorMessage()
    for order in orders:
        task = message.release.tasks.add()
        task.job, task.epoch = order.job, order.epoch
        task.item, task.stage = order.item, order.stage
    return message


# ---- jobs ----------------------------------------------------------------------------------------

_MODES: Final = {api.Mode.Value(mode.name): mode for mode in ev.Mode}
_POLICIES: Final = {api.Policy.Value(policy.name): policy for policy in ev.Policy}


def check_submission(request: api.SubmitJobRequest, document: PartitionDocument) -> None:
    """Raise `Malformed` for a request that cannot become a job."""
    if not is_job(request.name):
        long = f", of at most {LONGEST_JOB} characters" * (len(request.name) > LONGEST_JOB)
        raise Malformed(f"{request.name[:260]!r} is no name for a job, such as ocr-1{long}")
    if request.mode not in _MODES or request.policy not in _POLICIES:
        raise Malformed(f"mode {request.mode} or policy {request.policy} is not known here")
    if request.follow and request.mode != api.STREAMING:
        raise Malformed("a job that follows its inputs needs mode Streaming")
    if request.stages and len(request.stages) != len(document.fragments):
        raise Malformed(
            f"the plan has {len(request.stages)} stages, the partition {len(document.fragments)}"
        )
    for placement in request.stages:
        _check_stage(placement)
    _check_numbers(request)


def _check_numbers(request: api.SubmitJobRequest) -> None:
    if not 0 <= request.active_deadline_seconds < _LONGEST_SECONDS:
        raise Malformed(f"active_deadline_seconds is {request.active_deadline_seconds}")
    bounds = {"backoff_limit": 1000, "batch": LARGEST_BATCH, "epoch": (1 << 62) - 1}
    for name, most in bounds.items():
        if (number := getattr(request, name)) > most:
            raise Malformed(f"{name} is {number}, at most {most}")
    if request.retry.number >= 1 << 30:  # each retry counts it up
        raise Malformed(f"the retry has number {request.retry.number}")
    if len(request.retry.items) > MOST_RETRIED:
        raise Malformed(f"{len(request.retry.items)} items to retry, at most {MOST_RETRIED}")


def _check_stage(placement: api.StagePlacement) -> None:
    for device in placement.devices:
        if not is_device(device):
            raise Malformed(f"{device[:70]!r} in the plan is no name of a device")
    devices, grants = len(placement.devices), len(placement.granted_bytes)
    if grants not in {0, devices}:
        raise Malformed(f"a stage of the plan has {devices} devices, and {grants} grants")


def job_spec(
    request: api.SubmitJobRequest,
    document: PartitionDocument,
    *,
    items: int,
    epoch: int,
    deadline: Nanoseconds | None,
    open_ended: bool = False,
) -> ev.JobSpec:
    """The job of a checked request."""
    stages: list[ev.Stage] = []
    for fragment in document.fragments:
        into, out = document.into(fragment.index), document.out_of(fragment.index)
        placement = request.stages[fragment.index] if request.stages else api.StagePlacement()
        stages.append(
            ev.Stage(
                digest=fragment.digest,
                resident_bytes=Bytes(fragment.resident_bytes),
                least_bytes=Bytes(fragment.least_bytes),
                predecessors=tuple(sorted({e.producer for e in into if e.producer != MODEL})),
                takes_model_inputs=any(edge.producer == MODEL for edge in into),
                gives_results=any(edge.consumer == MODEL for edge in out),
                homes=tuple(dict.fromkeys(placement.devices)),
                granted=_granted(placement, fragment),
                predicted=_predicted(placement),
                output_bytes=document.output_bytes(fragment.index),
                batch=request.batch if fragment.batches else 1,
                batch_item_bytes=Bytes(document.batch_item_bytes(fragment.index) or 0),
            )
        )
    return ev.JobSpec(
        name=request.name,
        stages=tuple(stages),
        items=items,
        epoch=epoch,
        mode=_MODES[request.mode],
        policy=_POLICIES[request.policy],
        priority=request.priority,
        backoff_limit=request.backoff_limit,
        deadline=deadline,
        parallelism=request.parallelism,
        open_ended=open_ended,
        final_cut=request.final_cut,
        light=(
            request.mode == api.STREAMING
            and all(stage.batch <= 1 for stage in stages)
            and not request.lossy
            and is_light(document)
        ),
    )


def _predicted(placement: api.StagePlacement) -> tuple[tuple[str, Nanoseconds], ...]:
    predicted = zip(placement.devices, placement.predicted_seconds, strict=False)
    known = ((device, duration(seconds)) for device, seconds in predicted)
    return tuple((device, taken) for device, taken in known if taken)


def _granted(placement: api.StagePlacement, fragment: Fragment) -> tuple[tuple[str, Bytes], ...]:
    """The devices on which the plan has a fragment run in blocks, with what they grant it."""
    grants = dict(zip(placement.devices, placement.granted_bytes, strict=False))
    return tuple(
        (device, Bytes(max(granted, fragment.least_bytes)))
        for device, granted in grants.items()
        if 0 < granted < fragment.resident_bytes
    )


_PLAIN: Final = {ev.FailureKind.INVALID_INPUT, ev.FailureKind.OUTPUT, ev.FailureKind.CANCELLED}
"""Failures whose message says what they are."""


def failure_text(failure: ev.Failure) -> str:
    """A failure for people."""
    if failure.kind in _PLAIN:
        return failure.message
    return f"{failure.kind.value}: {failure.message}"
