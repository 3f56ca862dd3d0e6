"""What manifests ask for, in local terms: which file is cut how, which devices there are, where
files are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from shoal_api.kinds import DevicePool, InferenceJob, Model, Partition, Placement
from shoal_api.kinds.device_pool import DevicePoolSpec, LocalDevice
from shoal_api.kinds.placement import Pin
from shoal_api.schema import API_VERSION, parse
from shoal_cli.local.manifests import Manifests
from shoal_cli.transfer.addresses import resolve_uri
from shoal_planner.costs import ASSUMED_FLOPS_PER_CPU, PoolDevice
from shoal_protocol.choices import Objective, Residency
from shoal_protocol.units import Nanoseconds

BARE_POOL: Final = "local"
_MILLICPUS: Final = 1000

K = TypeVar("K", Model, DevicePool, Partition, InferenceJob)


class OrderRefused(Exception):
    """The manifests are sound, but local mode cannot do what they ask. The text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOrder:
    """How one model is to be cut, under the name of a Partition.

    With none of `fragments`, `max_bytes` and `tensors`: as few fragments as fit each of the
    `budgets`. `shapes` are those of inputs with dynamic axes; where they are absent, the first item
    in `sample` gives them.
    """

    name: str
    model: str
    path: Path
    digest: str | None
    shapes: Mapping[str, tuple[int, ...]]
    sample: Path | None
    fragments: int | None
    max_bytes: int | None
    tensors: tuple[str, ...]
    budgets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """A partition to be placed on a pool."""

    cut: CutOrder
    pool: DevicePool
    devices: tuple[LocalDevice, ...]
    objective: Objective
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """A job with the folders that it reads and writes."""

    job: InferenceJob
    plan: PlanOrder
    inputs: Path
    outputs: Path

    @property
    def name(self) -> str:
        return self.job.metadata.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything asked for: jobs to run, placements to show, and what the user is to be told."""

    jobs: tuple[JobOrder, ...]
    placements: tuple[tuple[str, PlanOrder], ...]
    notes: tuple[str, ...]


def read_orders(manifests: Manifests, volumes: Mapping[str, Path]) -> Orders:
    """Follow every reference and address. Raises `OrderRefused` or `AddressRefused`."""
    jobs = [job for job in manifests.jobs.values() if not job.spec.suspend]
    notes = list(manifests.notes)
    notes += [
        f"InferenceJob {name}: suspended, not run"
        for name, job in manifests.jobs.items()
        if job.spec.suspend
    ]
    placements = [
        (name, _placement_order(manifests, placement, volumes, sample=None))
        for name, placement in manifests.placements.items()
    ]
    orders = Orders(
        jobs=tuple(_job_order(manifests, job, volumes) for job in jobs),
        placements=tuple(placements),
        notes=tuple(notes),
    )
    _check_outputs(orders.jobs)
    return orders


def bare_manifests(  # noqa: PLR0913 - each is an option of `shoal run MODEL.onnx`
    model: Path,
    *,
    inputs: Path,
    outputs: Path,
    budgets: Sequence[int],
    fragments: int | None,
    residency: str,
    policy: str,
    mode: str,
) -> Manifests:
    """The manifests that `shoal run MODEL.onnx` stands for."""
    name = _dns_label(model.stem)
    spec: dict[str, object] = {"modelRef": {"name": name}}
    if fragments is not None:
        spec["fragments"] = fragments
    devices = [
        {"name": f"device-{number}", "memory": budget} for number, budget in enumerate(budgets, 1)
    ]
    pool = {
        "local": {"devices": devices},
        "budget": {"memory": max(budgets)},
        "residency": residency,
    }
    job = {
        "partitionRef": {"name": name},
        "poolRef": {"name": BARE_POOL},
        "inputs": {"uri": inputs.absolute().as_uri()},
        "outputs": {"uri": outputs.absolute().as_uri()},
        "policy": policy,
        "mode": mode,
    }
    source = {"source": {"uri": model.absolute().as_uri()}}
    return Manifests(
        models={name: _made(Model, name, source)},
        pools={BARE_POOL: _made(DevicePool, BARE_POOL, pool)},
        partitions={name: _made(Partition, name, spec)},
        placements={},
        jobs={name: _made(InferenceJob, name, job)},
        notes=(),
        folders={
            (kind, named): Path.cwd()
            for kind, named in (
                ("Model", name),
                ("Partition", name),
                ("InferenceJob", name),
                ("DevicePool", BARE_POOL),
            )
        },
    )


def _made(kind: type[K], name: str, spec: Mapping[str, object]) -> K:
    document = {
        "apiVersion": API_VERSION,
        "kind": kind.__name__,
        "metadata": {"name": name},
        "spec": spec,
    }
    value = parse(kind, document)
    if isinstance(value, tuple):
        raise OrderRefused("; ".join(str(error) for error in value))
    return value


def _job_order(manifests: Manifests, job: InferenceJob, volumes: Mapping[str, Path]) -> JobOrder:
    base = manifests.folder_of(job)
    spec = job.spec
    inputs = resolve_uri(spec.inputs.uri, base, volumes)
    outputs = resolve_uri(spec.outputs.uri, base, volumes)
    if spec.placement_ref is not None:
        placement = manifests.placements[spec.placement_ref.name]
        plan = _placement_order(manifests, placement, volumes, sample=inputs)
        return JobOrder(job=job, plan=plan, inputs=inputs, outputs=outputs)
    assert spec.pool_ref is not None, "the schema asks for it"
    pool = manifests.pools[spec.pool_ref.name]
    devices = _devices(pool)
    if spec.partition_ref is not None:
        partition = manifests.partitions[spec.partition_ref.name]
        cut = _partition_order(manifests, partition, volumes, devices, sample=inputs)
    else:
        assert spec.model_ref is not None, "the schema asks for one of the three"
        model = manifests.models[spec.model_ref.name]
        name = f"{spec.model_ref.name}-{spec.pool_ref.name}"
        cut = _cut_order(manifests, model, volumes, devices, name=name, sample=inputs, spec=None)
    plan = PlanOrder(cut=cut, pool=pool, devices=devices, objective=spec.objective, pins=())
    return JobOrder(job=job, plan=plan, inputs=inputs, outputs=outputs)


def _placement_order(
    manifests: Manifests, placement: Placement, volumes: Mapping[str, Path], *, sample: Path | None
) -> PlanOrder:
    pool = manifests.pools[placement.spec.pool_ref.name]
    devices = _devices(pool)
    partition = manifests.partitions[placement.spec.partition_ref.name]
    cut = _partition_order(manifests, partition, volumes, devices, sample=sample)
    return PlanOrder(
        cut=cut,
        pool=pool,
        devices=devices,
        objective=placement.spec.objective,
        pins=placement.spec.pins,
    )


def _partition_order(
    manifests: Manifests,
    partition: Partition,
    volumes: Mapping[str, Path],
    devices: tuple[LocalDevice, ...],
    *,
    sample: Path | None,
) -> CutOrder:
    model = manifests.models[partition.spec.model_ref.name]
    name = partition.metadata.name
    return _cut_order(manifests, model, volumes, devices, name=name, sample=sample, spec=partition)


def _cut_order(  # noqa: PLR0913 - the parts of one value
    manifests: Manifests,
    model: Model,
    volumes: Mapping[str, Path],
    devices: tuple[LocalDevice, ...],
    *,
    name: str,
    sample: Path | None,
    spec: Partition | None,
) -> CutOrder:
    source = model.spec.source
    return CutOrder(
        name=name,
        model=model.metadata.name,
        path=resolve_uri(source.uri, manifests.folder_of(model), volumes),
        digest=source.digest,
        shapes={shape.input: shape.shape for shape in model.spec.shapes},
        sample=sample,
        fragments=None if spec is None else spec.spec.fragments,
        max_bytes=None if spec is None else spec.spec.max_fragment_size,
        tensors=() if spec is None else spec.spec.cuts or (),
        budgets=tuple(device.memory for device in devices),
    )


def _devices(pool: DevicePool) -> tuple[LocalDevice, ...]:
    if pool.spec.local is None:
        raise OrderRefused(
            f"DevicePool {pool.metadata.name} has no spec.local: on one machine, say which devices "
            "it pretends to be, for example\n"
            "  local:\n"
            "    devices:\n"
            "    - {name: one, memory: 64Mi}\n"
            "    - {name: two, memory: 64Mi}"
        )
    return pool.spec.local.devices


def _check_outputs(jobs: Sequence[JobOrder]) -> None:
    """Two jobs must not write over one another, nor a job over its inputs."""
    owners: dict[Path, str] = {}
    for order in jobs:
        folder = order.outputs.resolve()
        other = owners.setdefault(folder, order.name)
        if other != order.name:
            raise OrderRefused(
                f"jobs {other} and {order.name} both write to {folder}; give each its own folder"
            )
        if folder == order.inputs.resolve():
            raise OrderRefused(f"job {order.name} would write over its own inputs in {folder}")


def _dns_label(text: str) -> str:
    """A name out of a file's: small letters, digits and dashes."""
    letters = (c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "".join(letters).strip("-")[:50].strip("-") or "model"


def local_pool(spec: DevicePoolSpec) -> tuple[PoolDevice, ...]:
    """The devices of local mode as planning sees them; one without `cpus` counts as one."""
    single = spec.residency is Residency.SINGLE
    devices = spec.local.devices if spec.local is not None else ()
    return tuple(_local_device(device, single=single) for device in devices)


def _local_device(device: LocalDevice, *, single: bool) -> PoolDevice:
    rate = device.link.rate if device.link is not None else None
    milliseconds = device.link.latency_milliseconds if device.link is not None else 0
    return PoolDevice(
        name=device.name,
        budget_bytes=device.memory,
        flops_per_second=ASSUMED_FLOPS_PER_CPU * (device.cpus or _MILLICPUS) // _MILLICPUS,
        link_bytes_per_second=None if rate is None else rate // 8,
        latency_nanoseconds=Nanoseconds(milliseconds * 1_000_000),
        single=single,
    )
