"""Disks that are full, and files that are damaged: noticed, said, and survived."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pool import Pool, cut, read_results, running_pool, write_items

from parity_with_whole import TOLERANCE, largest_difference, whole
from real_models import MODELS, find
from shoal_protocol.coordinator_client import CallFailed
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as pb
from small_disk import small_disk

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MODEL = "ppocr_cls"
ITEMS = 20


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    devices = [{"name": name, "memory": "48Mi"} for name in ("one", "two")]
    async with running_pool(tmp_path / "pool", devices, cgroups=False) as running:
        yield running


def prepare(pool: Pool, folder: Path) -> tuple[PartitionDocument, Path]:
    model, path = MODELS[MODEL], find(MODEL)
    document = cut(path, pool.store, 2, model.shapes())
    return document, write_items(folder / "in", [model.inputs(seed) for seed in range(ITEMS)])


def check_results(outputs: Path) -> None:
    model, path = MODELS[MODEL], find(MODEL)
    expected = whole(path, [model.inputs(seed) for seed in range(ITEMS)])
    for given, right in zip(read_results(outputs), expected, strict=True):
        assert largest_difference(given, right) <= TOLERANCE


@pytest.mark.minutes
async def test_a_corrupted_cached_fragment_is_detected_and_fetched_again(
    pool: Pool, tmp_path: Path
) -> None:
    document, inputs = prepare(pool, tmp_path)
    homes = [["one"], ["two"]]
    await pool.run("before", document, inputs, tmp_path / "first", homes=homes)
    digest = document.fragments[1].digest.removeprefix("sha256:")
    weights = pool.workspace.cache("two") / "fragments" / digest / "weights.bin"
    right = weights.read_bytes()
    # A byte in the middle changes, sizes do not. The next agent does not believe what it finds.
    wrong = bytearray(right)
    wrong[len(wrong) // 2] ^= 0xFF
    weights.unlink()
    weights.write_bytes(wrong)
    await pool.restart("two")
    status = await pool.run("after", document, inputs, tmp_path / "second", homes=homes)
    assert (status.state, status.succeeded) == (pb.JobStatus.COMPLETE, ITEMS), status
    assert weights.read_bytes() == right
    check_results(tmp_path / "second")


async def test_a_fragment_that_is_damaged_in_the_store_fails_a_job_once_and_not_for_ever(
    pool: Pool, tmp_path: Path
) -> None:
    document, inputs = prepare(pool, tmp_path)
    digest = document.fragments[1].digest
    weights = pool.store / "fragments" / digest.removeprefix("sha256:") / "weights.bin"
    wrong = bytearray(weights.read_bytes())
    wrong[len(wrong) // 2] ^= 0xFF
    weights.write_bytes(wrong)
    status = await pool.run("unlucky", document, inputs, tmp_path / "first")
    assert status.state == pb.JobStatus.FAILED
    assert f"{weights} does not match its checksum" in status.message
    assert not FragmentStore(pool.store).has(digest)
    with pytest.raises(CallFailed, match="lacks fragment 1"):
        await pool.run("refused", document, inputs, tmp_path / "second")
    assert prepare(pool, tmp_path / "again")[0] == document
    status = await pool.run("lucky", document, inputs, tmp_path / "third")
    assert (status.state, status.succeeded) == (pb.JobStatus.COMPLETE, ITEMS), status
    check_results(tmp_path / "third")


async def test_a_device_whose_disk_is_full_is_left_out(tmp_path: Path) -> None:
    devices = [{"name": name, "memory": "48Mi"} for name in ("one", "two")]
    with small_disk(tmp_path / "pool" / "cache" / "two", "128k"):
        async with running_pool(tmp_path / "pool", devices, cgroups=False) as pool:
            document, inputs = prepare(pool, tmp_path)
            status = await pool.run("crowded", document, inputs, tmp_path / "out")
            assert (status.state, status.succeeded) == (pb.JobStatus.COMPLETE, ITEMS), status
            assert (await pool.devices())["one"].tasks >= 2 * ITEMS
    check_results(tmp_path / "out")


@pytest.mark.minutes
async def test_results_that_find_no_room_fail_with_the_reason_and_come_when_there_is(
    pool: Pool, tmp_path: Path
) -> None:
    document, inputs = prepare(pool, tmp_path)
    outputs = tmp_path / "out"
    with small_disk(outputs, "64k"):
        filling = outputs / "filling"
        filling.write_bytes(bytes(40 << 10))
        status = await pool.run("tight", document, inputs, outputs)
        assert status.state != pb.JobStatus.COMPLETE
        assert status.succeeded < ITEMS
        said = status.message + "".join(failure.reason for failure in status.failures)
        assert "No space left on device" in said, status
        for path in outputs.glob("*.npz"):  # what stands is whole
            with np.load(path) as stored:
                assert stored.files
        subprocess.run(["mount", "-o", "remount,size=4m", str(outputs)], check=True)
        filling.unlink()
        status = await pool.run("tight", document, inputs, outputs)
        assert (status.state, status.succeeded) == (pb.JobStatus.COMPLETE, ITEMS), status
        check_results(outputs)


@pytest.mark.minutes
async def test_a_cache_full_of_an_ended_job_s_fragments_makes_room(tmp_path: Path) -> None:
    # Memory for both models, but a cache that holds the fragments of either, not of both.
    devices = [{"name": "one", "memory": "256Mi"}]
    folder = tmp_path / "pool"
    async with running_pool(folder, devices, cgroups=False, cache_size="16Mi") as pool:
        for name in ("ppocr_rec", "squeezenet1_1", "ppocr_rec"):
            model, path = MODELS[name], find(name)
            document = cut(path, pool.store, 2, model.shapes())
            place = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
            inputs = write_items(place / "in", [model.inputs(0)])
            status = await pool.run(place.name.replace("_", "-"), document, inputs, place / "out")
            assert status.state == pb.JobStatus.COMPLETE, status
