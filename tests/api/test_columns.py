"""What `kubectl get` prints of a status."""

import pytest

from shoal_api.columns import (
    as_quantity,
    as_rate,
    print_device,
    print_device_pool,
    print_job,
    print_model,
    print_partition,
    print_placement,
)
from shoal_api.conditions import JobWord
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds.device import CachedFragments, DeviceColumns, DeviceStatus
from shoal_api.kinds.device_pool import DeviceCounts, DevicePoolColumns, DevicePoolStatus
from shoal_api.kinds.inference_job import InferenceJobColumns, InferenceJobStatus, ItemCounts
from shoal_api.kinds.model import ModelColumns, ModelStatus
from shoal_api.kinds.partition import FragmentStatus, PartitionColumns, PartitionStatus
from shoal_api.kinds.placement import Cost, PlacementColumns, PlacementStatus, StageStatus


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (3 * 64 * 2**20, "192Mi"),
        (2**30, "1Gi"),
        (1536 * 2**20, "1536Mi"),
        (5 * 2**20 + 7, "5Mi"),
        (0, "0Mi"),
    ],
)
def test_a_size_is_written_as_a_manifest_would(count: int, text: str) -> None:
    assert as_quantity(count) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (38.2, "38/s"),
        (1234.5, "1234/s"),
        (1.54, "1.5/s"),
        (2.0, "2/s"),
        (0.02, "0.02/s"),
        (0, "0/s"),
    ],
)
def test_a_rate_is_short(rate: float, text: str) -> None:
    assert as_rate(rate) == text


def test_nothing_known_prints_nothing() -> None:
    assert print_model(ModelStatus()).columns == ModelColumns()
    assert print_device_pool(DevicePoolStatus()).columns == DevicePoolColumns()
    assert print_device(DeviceStatus()).columns == DeviceColumns()
    assert print_partition(PartitionStatus()).columns is None
    assert print_placement(PlacementStatus()).columns is None
    pending = print_job(InferenceJobStatus(), None, None).columns
    assert pending == InferenceJobColumns(status=JobWord.PENDING)


def test_a_model_prints_its_size_and_how_it_is_cut() -> None:
    printed = print_model(ModelStatus(size_bytes=10905190), (5, 3, 3)).columns
    assert printed == ModelColumns(size="10.4 MiB", fragments="3, 5")


def test_a_pool_and_a_device_print_budgets_as_quantities() -> None:
    pool = DevicePoolStatus(devices=DeviceCounts(total=3, ready=2), budget_bytes=192 << 20)
    assert print_device_pool(pool).columns == DevicePoolColumns(devices="2/3", budget="192Mi")
    cached = CachedFragments(count=3, bytes=10905190)
    device = DeviceStatus(budget_bytes=64 << 20, cached_fragments=cached)
    assert print_device(device).columns == DeviceColumns(budget="64Mi", cached="3 (10.4 MiB)")


def test_a_partition_prints_what_its_largest_fragment_needs() -> None:
    fragments = tuple(
        FragmentStatus(index=index, digest="sha256:0", weight_bytes=1, resident_bytes=size << 20)
        for index, size in enumerate((7, 14))
    )
    printed = print_partition(PartitionStatus(fragments=fragments)).columns
    assert printed == PartitionColumns(fragments="2", largest="14 MiB")


def test_a_placement_prints_its_devices_in_the_order_of_stages() -> None:
    stages = (
        StageStatus(fragments=(0,), devices=("jetson",), resident_bytes=1),
        StageStatus(fragments=(1,), devices=("pi-4", "pi-5"), resident_bytes=1),
    )
    status = PlacementStatus(stages=stages, predicted=Cost(items_per_second=38.2))
    expected = PlacementColumns(stages="2", devices="jetson, pi-4|pi-5", rate="38/s")
    assert print_placement(status).columns == expected
    many = PlacementStatus(stages=stages * 100)
    columns = print_placement(many).columns
    assert columns is not None
    assert len(columns.devices or "") == 512


def test_a_job_prints_how_far_it_is() -> None:
    planned = Condition(
        type="Planned",
        status=ConditionStatus.TRUE,
        reason="PlannedPlacement",
        last_transition_time="2026-01-31T12:00:00Z",
    )
    status = InferenceJobStatus(
        conditions=(planned,),
        start_time="2026-01-31T12:00:00Z",
        items=ItemCounts(total=400, succeeded=120),
        items_per_second=38.2,
    )
    assert print_job(status, "ppocr-rec", "shelf").columns == InferenceJobColumns(
        model="ppocr-rec", pool="shelf", items="120/400", rate="38/s", status=JobWord.RUNNING
    )
