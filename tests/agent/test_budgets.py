"""Budgets that change while fragments are resident, and fragments that come and go under one, as
the kernel measures it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.conftest import SOURCES
from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.in_process import Thread
from agent.scripted_coordinator import PATIENCE_SECONDS
from shoal_agent.runtime.failures import OverBudget
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.transport.buffers import nothing_arrives

MIB = 1 << 20


def changes(store: Path, count: int, switches: int) -> dict[str, Any]:
    """What a process reports whose budget changed that often, with two fragments in blocks, which
    were loaded or unloaded that often after it."""
    models = (dense_model([512] * 9), dense_model([512, *[1024, 512] * 4]))
    digests = [
        write_fragment(store, model, size, InBlocks(8)).digest
        for model, size in zip(models, (12 * MIB, 20 * MIB), strict=True)
    ]
    script = Path(__file__).with_name("changing_budgets.py")
    path = os.pathsep.join(str(SOURCES / each) for each in ("agent", "protos"))
    done = subprocess.run(
        [sys.executable, script, store, str(count), str(switches), *digests],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("count", "switches"),
    [(40, 20), pytest.param(500, 200, marks=[pytest.mark.minutes, pytest.mark.timeout(900)])],
)
def test_every_budget_is_kept_and_none_leaves_a_trace(
    tmp_path: Path, count: int, switches: int
) -> None:
    report = changes(tmp_path, count, switches)
    assert report["evicted"] == []
    over = [(budget, peak) for budget, peak, *_ in report["steps"] if peak > budget]
    assert over == []
    ((first, second),) = {tuple(outputs) for *_, outputs in report["steps"]}
    # Memory is used where there is some: the largest budget holds all, the smallest one block each.
    peaks = [peak for _, peak, *_ in report["steps"]]
    assert min(peaks) < 8 * MIB < 20 * MIB < max(peaks)
    # Whoever comes gets room from the other, which runs in less.
    assert max(peak for peak, *_ in report["switched"]) <= report["budget"]
    assert {each for *_, found in report["switched"] for each in found.values()} == {first, second}
    assert 2 in {len(found) for *_, found in report["switched"]}
    # Sessions that stayed open would come to 0.5 MiB with each change between blocks and whole.
    assert report["left"] < 2 * MIB
    assert report["mapped"] == 0


async def test_a_fragment_has_all_of_its_memory_again_when_what_held_it_at_a_change_has_gone(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 24 * MIB, InBlocks(8))
    fragments = make()
    await fragments.load(made.digest, made.resident_bytes, [])
    with nothing_arrives(fragments.ledger, fragments.ledger.free):  # as in a guarded run
        changing = asyncio.create_task(fragments.change_budget(50 * MIB))
        while fragments.ledger.budget != 50 * MIB:
            await asyncio.sleep(0)
    await changing
    assert fragments.ledger.shares[made.digest].granted == made.resident_bytes
    await fragments.unload(made.digest)
    await fragments.close()


class Trying(Runtime):
    """It says when a trial begins, which ends when it may."""

    begun = threading.Event()
    may_end = threading.Event()

    def open_and_try(self, *arguments: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_SECONDS)
        return super().open_and_try(*arguments, **options)


async def test_a_load_that_waits_for_what_a_trial_holds_goes_on_when_that_has_ended(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    one, two = (
        write_fragment(tmp_path, dense_model([512, size, 512]), 20 * MIB) for size in (512, 1024)
    )
    fragments = make(kind=Trying)
    loads = [asyncio.create_task(fragments.load(one.digest, one.resident_bytes, []))]
    assert await asyncio.to_thread(Trying.begun.wait, PATIENCE_SECONDS)
    loads.append(asyncio.create_task(fragments.load(two.digest, two.resident_bytes, [])))
    await asyncio.sleep(0.05)
    assert two.digest not in fragments.ledger.in_flight, "a trial has all that is free"
    Trying.may_end.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*loads)
    assert set(fragments.ledger.resident) == {one.digest, two.digest}
    for each in (one, two):
        await fragments.unload(each.digest)
    await fragments.close()


async def test_a_load_that_waits_for_what_moves_is_not_overtaken_by_what_comes(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    """A device that is busy always receives or sends something."""
    one, two = (
        write_fragment(tmp_path, dense_model([512, size, 512]), 20 * MIB) for size in (512, 1024)
    )
    fragments = make(budget=44 * MIB)
    await fragments.load(one.digest, one.resident_bytes, [])
    assert fragments.request_move(8 * MIB)
    loading = asyncio.create_task(fragments.load(two.digest, two.resident_bytes, []))
    await asyncio.sleep(0.05)
    assert two.digest not in fragments.ledger.in_flight
    assert not fragments.request_move(4 * MIB)
    assert not fragments.request_space(4 * MIB)
    fragments.end_move(8 * MIB)
    assert not fragments.request_move(8 * MIB)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await loading
    assert fragments.request_move(4 * MIB)
    fragments.end_move(4 * MIB)
    for each in (one, two):
        await fragments.unload(each.digest)
    await fragments.close()


async def test_a_run_that_is_stopped_for_what_moves_beside_it_runs_again_when_that_has_ended(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 11 * MIB)
    fragments = make()
    await fragments.load(made.digest, made.resident_bytes, [])
    x = {"x": np.ones((1, 512), np.float32)}
    first = (await fragments.run(made.digest, x)).outputs["y"]
    assert fragments.request_move(48 * MIB)
    moving = np.ones(48 * MIB, np.uint8)
    await fragments.change_budget(32 * MIB)
    running = asyncio.create_task(fragments.run(made.digest, x))
    await asyncio.wait((running,), timeout=0.5)
    del moving
    fragments.end_move(48 * MIB)
    outputs = (await asyncio.wait_for(running, PATIENCE_SECONDS)).outputs["y"]
    assert np.array_equal(outputs, first)
    await fragments.unload(made.digest)
    await fragments.close()


async def test_a_fragment_whose_trial_was_stopped_is_tried_again_where_there_is_more(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    largest = {"x": (2048, 1024)}  # 8 MiB, and activations of as much
    made = write_fragment(tmp_path, dense_model([1024] * 4), 14 * MIB, largest=largest)
    fragments = make(budget=24 * MIB)
    for _ in range(2):
        with pytest.raises(OverBudget, match="takes more than"):
            await fragments.load(made.digest, 20 * MIB, [])
    await fragments.change_budget(64 * MIB)
    await fragments.load(made.digest, 20 * MIB, [])
    assert 24 * MIB < fragments.ledger.resident[made.digest] <= 64 * MIB
    await fragments.unload(made.digest)
    await fragments.close()


async def test_what_a_larger_budget_leaves_is_lent_to_a_fragment_that_streams(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 24 * MIB, InBlocks(8))
    fragments = make(budget=made.least_bytes)
    await fragments.load(made.digest, made.least_bytes, [])
    assert fragments.ledger.shares[made.digest].granted == made.least_bytes
    await fragments.change_budget(64 * MIB)
    share = fragments.ledger.shares[made.digest]
    assert share.granted == share.useful > made.least_bytes
    await fragments.unload(made.digest)
    await fragments.close()


async def test_a_load_that_is_cancelled_while_others_make_room_leaves_nothing_behind(
    tmp_path: Path, make: Callable[..., Fragments], processor: Thread
) -> None:
    """As when a session ends."""
    first = write_fragment(tmp_path, dense_model([512] * 9), 48 * MIB, InBlocks(8))
    second = write_fragment(tmp_path, dense_model([512] * 9, seed=1), 24 * MIB, InBlocks(8))
    fragments, may_go_on = make(), threading.Event()
    await fragments.load(first.digest, first.resident_bytes, [])
    processor.submit(may_go_on.wait, PATIENCE_SECONDS)
    loading = asyncio.create_task(fragments.load(second.digest, second.resident_bytes, []))
    while second.digest not in fragments.ledger.in_flight:
        await asyncio.sleep(0)
    loading.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not fragments.ledger.in_flight
        await fragments.load(second.digest, second.resident_bytes, [])
    for each in (first, second):
        await fragments.unload(each.digest)
    await fragments.close()


async def test_a_fragment_is_loaded_again_when_a_load_that_lost_its_place_has_ended(
    tmp_path: Path, make: Callable[..., Fragments]
) -> None:
    """Two loads of one fragment at a time would be one in the ledger."""
    made = write_fragment(tmp_path, dense_model([512] * 9), 24 * MIB)
    fragments = make(kind=Trying)
    Trying.begun.clear()
    Trying.may_end.clear()
    lost = asyncio.create_task(fragments.load(made.digest, made.resident_bytes, []))
    assert await asyncio.to_thread(Trying.begun.wait, PATIENCE_SECONDS)
    for budget in (16, 64):
        await fragments.change_budget(budget * MIB)
    again = asyncio.create_task(fragments.load(made.digest, made.resident_bytes, []))
    await asyncio.sleep(0.05)
    Trying.may_end.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(OverBudget, match="was given up while it was loaded"):
            await lost
        assert (await again).resident_bytes == made.resident_bytes
    assert set(fragments.ledger.resident) == {made.digest}
    await fragments.run(made.digest, {"x": np.ones((1, 512), np.float32)})
    await fragments.unload(made.digest)
    await fragments.close()
