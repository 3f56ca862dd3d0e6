"""The room on disk that prepared forms take: old fragments make it, and a form that had to go is
made again."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.fragment_making import MadeFragment, dense_model, tree_model, write_fragment
from agent.model_families import half_precision
from agent.test_preparation import AMPLE, MIB, Bench, mapped_bytes
from shoal_agent.cache.disk import KEPT_SECONDS, FragmentCache
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import CrashedAtLoad
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.telemetry import pressure
from shoal_protocol.digests import Digest
from shoal_protocol.disk_shares import MORE_DISK
from shoal_protocol.fragment_store import read_manifest
from troubled_disk import slow_disk


@pytest.fixture
def dense(tmp_path: Path) -> MadeFragment:
    return write_fragment(tmp_path, dense_model([256, 512, 256]), 8 * MIB)


def another(folder: Path, seconds_ago: float) -> MadeFragment:
    """A fragment that was used last so long ago."""
    made = write_fragment(folder, dense_model([512, 512, 512], seed=1), 8 * MIB)
    status = made.folder.stat()
    used = status.st_mtime_ns - int(seconds_ago * 1e9)
    os.utime(made.folder, ns=(used, used))
    return made


async def test_a_form_that_had_to_go_is_made_again(tmp_path: Path, dense: MadeFragment) -> None:
    """It went because a fetch needed the room, or with its fragment, which was fetched again."""
    bench = Bench(tmp_path)
    assert await bench.prepare(dense) is not None
    shutil.rmtree(dense.folder / "prepared")
    assert await bench.prepare(dense) is not None


async def test_fragments_that_nobody_has_used_for_long_make_room_for_a_form(
    tmp_path: Path, dense: MadeFragment
) -> None:
    old = another(tmp_path, seconds_ago=KEPT_SECONDS + 60)
    bench = Bench(tmp_path, cache_bytes=10 * MIB)
    bench.cache.limit_bytes = bench.cache.total_bytes + 1
    assert await bench.prepare(dense) is None, "what is left of the cache is too little in any case"
    assert old.digest in bench.cache
    bench.cache.limit_bytes = 8 * MIB
    assert await bench.prepare(dense) is not None
    assert old.digest not in bench.cache
    assert bench.cache.total_bytes <= bench.cache.limit_bytes


@pytest.mark.parametrize("in_use", [False, True])
async def test_fragments_that_take_turns_make_no_room_for_a_form(
    tmp_path: Path, dense: MadeFragment, in_use: bool
) -> None:
    """They would have to be fetched again, each time."""
    other = another(tmp_path, seconds_ago=2 * KEPT_SECONDS if in_use else KEPT_SECONDS / 2)
    bench = Bench(tmp_path, cache_bytes=8 * MIB)
    if in_use:
        bench.cache.pin(other.digest)
    assert await bench.prepare(dense) is None
    assert other.digest in bench.cache


async def test_a_fragment_is_prepared_when_the_disk_has_room_for_it_again(
    tmp_path: Path, dense: MadeFragment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal.agent")
    bench = Bench(tmp_path, cache_bytes=2 * MIB)
    assert await bench.prepare(dense) is None

    def said_of_it() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name.startswith("shoal")]

    (said,) = (each for each in said_of_it() if "is not prepared" in each)
    assert "on disk, have 0" not in said
    assert MORE_DISK in said
    caplog.clear()
    assert await bench.prepare(dense) is None
    assert said_of_it() == [], "the same was said again"
    bench.cache.limit_bytes = 1 << 30
    assert await bench.prepare(dense) is not None


async def test_a_fragment_is_prepared_when_the_disk_takes_its_form_again(
    tmp_path: Path, dense: MadeFragment
) -> None:
    bench = Bench(tmp_path)
    (dense.folder / "prepared").touch()
    for _ in range(2):
        assert await bench.prepare(dense) is None, "no folder can be made there"
    (dense.folder / "prepared").unlink()
    assert await bench.prepare(dense) is not None


async def test_a_form_that_could_not_be_saved_has_shown_that_it_can_be_opened(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    crashing = write_fragment(tmp_path, tree_model(20_000), 8 * MIB)
    (crashing.folder / "prepared").touch()
    with pytest.raises(CrashedAtLoad, match="SIGSEGV"):
        await bench.prepare(crashing)


async def test_one_large_weight_of_half_precision_is_prepared(tmp_path: Path) -> None:
    """It is saved as floats, and packed: four times its bytes."""
    made = write_fragment(tmp_path, half_precision(2048, layers=1), 40 * MIB)
    prepared = await Bench(tmp_path).prepare(made)
    assert prepared is not None
    assert prepared.weights.stat().st_size >= 4 * 8 * MIB


async def test_weights_of_a_form_that_had_to_go_leave_memory_as_before(
    tmp_path: Path, dense: MadeFragment
) -> None:
    """The files are gone, and what is open has them mapped still."""
    prepared = await Bench(tmp_path).preparation.prepare(dense.digest, dense.folder, 8 * MIB)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("f", dense.folder, 8 * MIB, prepared)
    runtime.run("f", {"x": np.ones((1, 256), np.float32)}, Stopper())
    shutil.rmtree(dense.folder / "prepared")
    before = mapped_bytes(dense, "prepared/")
    assert before is not None
    assert before[0] > 0
    runtime.drop_weights("f")
    assert mapped_bytes(dense, "prepared/") == (0, 0)
    runtime.close("f")


async def test_a_preparation_that_was_cancelled_is_done_the_next_time(
    tmp_path: Path, dense: MadeFragment, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, began = Bench(tmp_path), asyncio.Event()
    run = bench.preparation._run_child

    async def noted(*arguments: Any) -> Any:
        began.set()
        return await run(*arguments)

    monkeypatch.setattr(bench.preparation, "_run_child", noted)
    preparing = asyncio.create_task(bench.prepare(dense))
    await began.wait()
    preparing.cancel()  # as a session does that breaks
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert await bench.prepare(dense) is not None


async def test_what_was_prepared_while_a_load_was_cancelled_counts(
    tmp_path: Path, dense: MadeFragment, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    with slow_disk(monkeypatch) as disk:
        preparing = asyncio.create_task(bench.prepare(dense))
        await asyncio.to_thread(disk.entered.wait)  # it has its name, and is synced
        preparing.cancel()
        await asyncio.sleep(0)
        disk.released.set()
        with pytest.raises(asyncio.CancelledError):
            await preparing
    assert await bench.prepare(dense) is not None
    assert bench.cache.total_bytes == Bench(tmp_path).cache.total_bytes


async def test_a_preparation_that_has_ended_its_agent_is_left_out_by_the_next_process(
    tmp_path: Path, dense: MadeFragment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel ends all processes of a container together."""
    group = tmp_path / "group"
    group.write_text("0::/pod\n")
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/memory.oom.group").write_text("1\n")
    monkeypatch.setattr(pressure, "OWN_GROUP", group)
    monkeypatch.setattr(pressure, "GROUPS", tmp_path)
    mark, bench = tmp_path / "preparation.json", Bench(tmp_path)
    kept: list[bytes] = []
    run = bench.preparation._run_child

    async def noted(*arguments: Any) -> Any:
        kept.append(mark.read_bytes())
        return await run(*arguments)

    monkeypatch.setattr(bench.preparation, "_run_child", noted)
    assert await bench.prepare(dense) is not None
    shutil.rmtree(dense.folder / "prepared")
    assert not mark.exists()
    mark.write_bytes(kept[0])  # that process was ended within it
    assert await Bench(tmp_path).prepare(dense) is None
    assert await Bench(tmp_path).prepare(dense) is not None, "the next one tries it again"


def test_what_is_left_of_a_fetch_makes_way_for_what_is_prepared(
    tmp_path: Path, dense: MadeFragment
) -> None:
    cache = FragmentCache(tmp_path, 4 * MIB)
    manifest = read_manifest(dense.folder, Digest(dense.digest))
    cache.drop(dense.digest)
    cache.make_room(manifest)
    room = 4 * MIB - manifest.total_bytes
    assert cache.make_room_to_prepare(4 * MIB) == room, "it is being fetched"
    cache.give_up(dense.digest)
    assert cache.make_room_to_prepare(room) == room
    (part,) = cache.folder.iterdir()
    assert cache.make_room_to_prepare(4 * MIB) == 4 * MIB
    assert not part.exists()
