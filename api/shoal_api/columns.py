"""What `kubectl get` prints of a status. A printer column prints one text of the
object, so the operator writes these texts beside what they are made of.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal_api.conditions import job_word
from shoal_api.kinds.device import DeviceColumns, DeviceStatus
from shoal_api.kinds.device_pool import DevicePoolColumns, DevicePoolStatus
from shoal_api.kinds.inference_job import InferenceJobColumns, InferenceJobStatus, ItemCounts
from shoal_api.kinds.model import ModelColumns, ModelStatus
from shoal_api.kinds.partition import PartitionColumns, PartitionStatus
from shoal_api.kinds.placement import PlacementColumns, PlacementStatus, StageStatus
from shoal_protocol.units import format_bytes


def print_model(status: ModelStatus, partitions: Iterable[int] = ()) -> ModelStatus:
    """`partitions`: the numbers of fragments that the model was cut into."""
    columns = ModelColumns(
        size=None if status.size_bytes is None else format_bytes(status.size_bytes),
        fragments=", ".join(map(str, sorted(set(partitions)))) or None,
    )
    return replace(status, columns=columns)


def print_device_pool(status: DevicePoolStatus) -> DevicePoolStatus:
    """Devices as ready of all."""
    devices = status.devices
    columns = DevicePoolColumns(
        devices=None if devices is None else f"{devices.ready}/{devices.total}",
        budget=None if status.budget_bytes is None else as_quantity(status.budget_bytes),
    )
    return replace(status, columns=columns)


def print_device(status: DeviceStatus) -> DeviceStatus:
    """The budget, and what is cached."""
    cached = status.cached_fragments
    columns = DeviceColumns(
        budget=None if status.budget_bytes is None else as_quantity(status.budget_bytes),
        cached=None if cached is None else f"{cached.count} ({format_bytes(cached.bytes)})",
    )
    return replace(status, columns=columns)


def print_partition(status: PartitionStatus) -> PartitionStatus:
    """How many fragments, and what the largest needs."""
    if not status.fragments:
        return replace(status, columns=None)
    largest = max(fragment.resident_bytes for fragment in status.fragments)
    columns = PartitionColumns(fragments=str(len(status.fragments)), largest=format_bytes(largest))
    return replace(status, columns=columns)


def print_placement(status: PlacementStatus) -> PlacementStatus:
    """The plan's stages and what it is predicted to give."""
    if not status.stages:
        return replace(status, columns=None)
    rate = None if status.predicted is None else status.predicted.items_per_second
    columns = PlacementColumns(
        stages=str(len(status.stages)),
        devices=_devices(status.stages),
        rate=None if rate is None else as_rate(rate),
    )
    return replace(status, columns=columns)


def print_job(
    status: InferenceJobStatus, model: str | None, pool: str | None
) -> InferenceJobStatus:
    """`model` and `pool`: the names that the job's references lead to, once they are known."""
    items, rate = status.items, status.items_per_second
    columns = InferenceJobColumns(
        model=model,
        pool=pool,
        items=None if items is None else _done(items),
        rate=None if rate is None else as_rate(rate),
        status=job_word(status.conditions, started=status.start_time is not None),
    )
    return replace(status, columns=columns)


def as_quantity(count: int) -> str:
    """Bytes as a manifest would write them: `192Mi`; rounded down where that is not exact."""
    for unit, suffix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return f"{count // 2**20}Mi"


def as_rate(items_per_second: float) -> str:
    """`38/s`, `1.5/s`, `0.02/s`: two digits, or all before the point."""
    digits = 0 if items_per_second >= 10 else 1 if items_per_second >= 1 else 2
    text = f"{items_per_second:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}/s"


def _done(items: ItemCounts) -> str:
    """`120/400`, or `120/400+` where more may come."""
    return f"{items.succeeded}/{items.total}{'+' if items.following else ''}"


def _devices(stages: Sequence[StageStatus]) -> str:
    """`jetson, pi-4|pi-5, pi-zero`, cut where the column ends."""
    text = ", ".join("|".join(stage.devices) for stage in stages)
    return text if len(text) <= 512 else f"{text[:509]}..."
