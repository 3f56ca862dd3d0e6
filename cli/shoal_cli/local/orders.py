"""What manifests ask for, in local terms: which file is cut how, on which devices, and where files
are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shoal_api.kinds import DevicePool, InferenceJob, Placement
from shoal_api.kinds.device_pool import LocalDevice
from shoal_api.kinds.partition import PartitionSpec
from shoal_api.kinds.placement import Pin
from shoal_api.schema import API_VERSION
from shoal_api.shapes import did_you_mean
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.manifests import NO_STREAMS, Manifests, Streams, manifests_of
from shoal_cli.transfer.addresses import AddressRefused, claim_of, resolve_uri
from shoal_planner.devices import PoolDevice
from shoal_planner.speeds import measured_device
from shoal_protocol.choices import Cutting, Mode, PinPolicy, Policy, Precision, Residency
from shoal_protocol.disk_shares import for_fragments
from shoal_protocol.partition import Outgrown
from shoal_protocol.speeds import UNKNOWN_SPEED, Link, Speed
from shoal_protocol.units import Bytes

BARE_POOL: Final = "local"
_BARE_CACHE: Final = "1Ti"
"""Nobody has said how much of this machine's disk the devices of a bare model may have, so what the
disk has is the limit."""
_MILLICPUS: Final = 1000


class OrderRefused(Exception):
    """The manifests are sound, but local mode cannot do what they ask. The text says what to do."""


class JobRefused(Exception):
    """A job that cannot begin: its inputs or outputs, or the coordinator, refuse it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """A partition to be placed on a pool, whose devices this machine pretends to be."""

    cut: CutOrder
    pool: DevicePool
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """A job with the folders that it reads and writes. `final_cut`: no finer cut is possible, so
    items for which a fragment takes too much fail by themselves."""

    job: InferenceJob
    plan: PlanOrder
    inputs: Path
    outputs: Path
    streams: Streams = NO_STREAMS
    final_cut: bool = False

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def follows(self) -> bool:
        """Whether inputs that come while the job runs are taken too."""
        return self.job.spec.inputs.follow

    @property
    def lossy(self) -> bool:
        """Whether activations travel in half precision."""
        return self.job.spec.transfer_precision is Precision.HALF

    @property
    def batch(self) -> int:
        """How many items may run at once; 0: each runs alone."""
        batching = self.job.spec.batching
        return 0 if batching is None else batching.max_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything asked for: jobs to run, placements to show, and notes for the user."""

    jobs: tuple[JobOrder, ...]
    placements: tuple[tuple[str, PlanOrder], ...]
    notes: tuple[str, ...]


def read_orders(
    manifests: Manifests, volumes: Mapping[str, Path], speed: Speed = UNKNOWN_SPEED
) -> Orders:
    """Follow every reference and address; `speed` is this machine's. Raises `OrderRefused` or
    `AddressRefused`."""
    _check_volumes(manifests, volumes)
    reader = _Reader(manifests, volumes, speed)
    jobs = manifests.jobs.values()
    suspended = [job.metadata.name for job in jobs if job.spec.suspend]
    notes = [f"InferenceJob {name}: suspended, not run" for name in suspended]
    notes += _preferring_nobody(manifests)
    placements = manifests.placements.items()
    orders = Orders(
        placements=tuple((name, reader.placement(each, sample=None)) for name, each in placements),
        jobs=tuple(reader.job(job) for job in jobs if not job.spec.suspend),
        notes=(*manifests.notes, *notes),
    )
    _check_outputs(orders.jobs)
    return orders


def _preferring_nobody(manifests: Manifests) -> Iterator[str]:
    """A preference for a device that the pool does not have is a misspelt one. On a cluster the
    device may come; here the pool has all that it will ever have."""
    for name, placement in manifests.placements.items():
        pool = manifests.pools[placement.spec.pool_ref.name]
        known = [each.name for each in _devices(pool)]
        for pin in placement.spec.pins:
            if pin.policy is PinPolicy.PREFERRED and pin.device not in known:
                prefers = f"Placement {name}: fragment {pin.fragment} prefers {pin.device}"
                near = did_you_mean(pin.device, known)
                yield f"{prefers}, which DevicePool {pool.metadata.name} does not have{near}"


def bare_manifests(  # noqa: PLR0913 - each is an option of `shoal run MODEL.onnx`
    model: Path,
    *,
    inputs: Path,
    outputs: Path,
    budgets: Sequence[int],
    fragments: int | None,
    residency: Residency,
    policy: Policy,
    mode: Mode,
    batching: int | None = None,
) -> Manifests:
    """The manifests that `shoal run MODEL.onnx` stands for."""
    name, specs = _bare_specs(model, budgets, fragments, residency, {})
    specs["InferenceJob", name] = {
        "partitionRef": {"name": name},
        "poolRef": {"name": BARE_POOL},
        "inputs": {"uri": inputs.absolute().as_uri()},
        "outputs": {"uri": outputs.absolute().as_uri()},
        "policy": policy.value,
        "mode": mode.value,
        **({} if batching is None else {"batching": {"maxItems": batching}}),
    }
    return _manifests(model, specs)


def bare_placement(
    model: Path,
    *,
    budgets: Sequence[int],
    fragments: int | None,
    residency: Residency,
    shapes: Mapping[str, tuple[int, ...]],
) -> Manifests:
    """The manifests that `shoal plan MODEL.onnx` stands for: a model without a job."""
    name, specs = _bare_specs(model, budgets, fragments, residency, shapes)
    specs["Placement", name] = {"partitionRef": {"name": name}, "poolRef": {"name": BARE_POOL}}
    return _manifests(model, specs)


_Specs = dict[tuple[str, str], dict[str, object]]
"""By kind and name."""


def _bare_specs(
    model: Path,
    budgets: Sequence[int],
    fragments: int | None,
    residency: Residency,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[str, _Specs]:
    """The model, how it is cut, and the devices, under a name made of the file's."""
    name = dns_label(model.stem)
    how: dict[str, object] = {"cutting": Cutting.PLANNED.value}
    if fragments is not None:
        how = {"fragments": fragments}
    given = [{"input": each, "shape": list(shape)} for each, shape in shapes.items()]
    return name, {
        ("Model", name): {"source": {"uri": model.absolute().as_uri()}, "shapes": given},
        ("Partition", name): {"modelRef": {"name": name}, **how},
        ("DevicePool", BARE_POOL): _bare_pool(budgets, residency),
    }


def bare_pool(budgets: Sequence[int], residency: Residency = Residency.ADAPTIVE) -> DevicePool:
    """A pool of devices with these budgets. Raises `ManifestErrors`."""
    specs: _Specs = {("DevicePool", BARE_POOL): _bare_pool(budgets, residency)}
    return _manifests("the pool", specs).pools[BARE_POOL]


def _bare_pool(budgets: Sequence[int], residency: Residency) -> dict[str, object]:
    devices = [
        {"name": f"device-{number}", "memory": budget} for number, budget in enumerate(budgets, 1)
    ]
    return {
        "local": {"devices": devices},
        "budget": {"memory": max(budgets)},
        "cache": {"size": _BARE_CACHE},
        "residency": residency.value,
    }


def _manifests(source: Path | str, specs: _Specs) -> Manifests:
    return manifests_of(
        str(source),
        [
            {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
            for (kind, name), spec in specs.items()
        ],
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    manifests: Manifests
    volumes: Mapping[str, Path]
    speed: Speed

    def job(self, job: InferenceJob) -> JobOrder:
        base = self.manifests.folder_of(job)
        inputs = self._readable(job.spec.inputs.uri, base)
        outputs = resolve_uri(job.spec.outputs.uri, base, self.volumes)
        plan, follows = self._plan(job, inputs), job.spec.inputs.follow
        # Divisions that manifests name are of the cut for all inputs.
        smaller_first = not follows and not plan.cut.outgrown
        cut = replace(plan.cut, follows=follows, smaller_first=smaller_first)
        return JobOrder(
            job=job,
            plan=replace(plan, cut=cut),
            inputs=inputs,
            outputs=outputs,
            streams=self.manifests.streams.get(job.metadata.name, NO_STREAMS),
        )

    def _plan(self, job: InferenceJob, sample: Path) -> PlanOrder:
        spec = job.spec
        if spec.placement_ref is not None:
            return self.placement(self.manifests.placements[spec.placement_ref.name], sample)
        assert spec.pool_ref is not None, "the schema asks for it"
        pool = self.manifests.pools[spec.pool_ref.name]
        devices = planned_devices(pool, self.speed)
        if spec.partition_ref is not None:
            cut = self._partition(spec.partition_ref.name, sample)
        else:
            assert spec.model_ref is not None, "the schema asks for one of the three"
            model = spec.model_ref.name
            cut = self._cut(f"{model}-{spec.pool_ref.name}", model, None, sample)
        return PlanOrder(cut=replace(cut, devices=devices, objective=spec.objective), pool=pool)

    def placement(self, placement: Placement, sample: Path | None) -> PlanOrder:
        spec = placement.spec
        pool = self.manifests.pools[spec.pool_ref.name]
        devices = planned_devices(pool, self.speed)
        cut = replace(
            self._partition(spec.partition_ref.name, sample),
            devices=devices,
            objective=spec.objective,
            pinned=bool(spec.pins),
        )
        if cut.planned and cut.pinned:
            raise OrderRefused(
                f"Placement {placement.metadata.name} pins fragments by their numbers, and "
                f"Partition {cut.name} leaves the cuts to it (cutting: Planned); remove the pins, "
                "or write fragments, maxFragmentSize or cuts"
            )
        return PlanOrder(cut=cut, pool=pool, pins=spec.pins)

    def _partition(self, name: str, sample: Path | None) -> CutOrder:
        spec = self.manifests.partitions[name].spec
        return self._cut(name, spec.model_ref.name, spec, sample)

    def _cut(
        self,
        name: str,
        model_name: str,
        spec: PartitionSpec | None,
        sample: Path | None,
    ) -> CutOrder:
        model = self.manifests.models[model_name]
        source = model.spec.source
        return CutOrder(
            name=name,
            model=model_name,
            path=self._readable(source.uri, self.manifests.folder_of(model)),
            digest=source.digest,
            shapes={shape.input: shape.shape for shape in model.spec.shapes},
            sample=sample,
            fragments=None if spec is None else spec.fragments,
            max_bytes=None if spec is None else spec.max_fragment_size,
            tensors=() if spec is None else spec.cuts or (),
            planned=spec is not None and spec.cutting is Cutting.PLANNED,
            seen={} if spec is None else {each.tensor: each.shape for each in spec.seen},
            outgrown=()
            if spec is None
            else tuple(
                Outgrown(fragment=each.fragment, need_bytes=each.need_bytes)
                for each in spec.outgrown
            ),
        )

    def _readable(self, uri: str, base: Path) -> Path:
        """The path of what is read; a claim's folder must exist."""
        path = resolve_uri(uri, base, self.volumes)
        claim = claim_of(uri)
        if claim and not (folder := self.volumes.get(claim, base / claim)).is_dir():
            near = did_you_mean(claim, self.volumes)
            raise AddressRefused(
                uri, f"there is no folder {folder}; say --volume {claim}=DIR{near}"
            )
        return path


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


def _check_volumes(manifests: Manifests, volumes: Mapping[str, Path]) -> None:
    """A volume that nothing names is a misspelt one: its claim would be looked for elsewhere."""
    uris = [model.spec.source.uri for model in manifests.models.values()]
    for job in manifests.jobs.values():
        uris += [job.spec.inputs.uri, job.spec.outputs.uri]
    claims = sorted({claim_of(uri) for uri in uris} - {""})
    for name in volumes:
        if name not in claims:
            known = (
                f"the manifests name {', '.join(claims)}" if claims else "there is no pvc:// at all"
            )
            near = did_you_mean(name, claims)
            raise OrderRefused(f"--volume {name}: nothing is at pvc://{name}/; {known}{near}")


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


def dns_label(text: str) -> str:
    """A name out of a file's: small letters, digits and dashes."""
    letters = (c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "".join(letters).strip("-")[:50].strip("-") or "model"


def planned_devices(pool: DevicePool, speed: Speed = UNKNOWN_SPEED) -> tuple[PoolDevice, ...]:
    """The devices as planning sees them, on a machine of this speed: one without `cpus` counts as
    one thread, and they share the disk."""
    devices, disk = _devices(pool), speed.disk_bytes_per_second
    if disk is not None:
        speed = replace(speed, disk_bytes_per_second=disk / len(devices))
    single = pool.spec.residency is Residency.SINGLE
    cache = for_fragments(pool.spec.cache.size)
    return tuple(_planned_device(each, speed, cache, single=single) for each in devices)


def _planned_device(
    device: LocalDevice, speed: Speed, cache_bytes: Bytes, *, single: bool
) -> PoolDevice:
    rate = device.link.rate if device.link is not None else None
    milliseconds = device.link.latency_milliseconds if device.link is not None else 0
    return measured_device(
        device.name,
        device.memory,
        replace(speed, processors=(device.cpus or _MILLICPUS) / _MILLICPUS),
        Link(
            bytes_per_second=None if rate is None else rate / 8,
            round_trip_seconds=2 * milliseconds / 1000,
        ),
        cache_bytes=cache_bytes,
        single=single,
    )
