"""Fragments whose grant grows: they run on in blocks, and are opened whole beside them."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.in_process import Thread, make_fragments
from agent.own_process import in_own_process
from agent.test_preparation import AMPLE, MIB, Bench, mapped_bytes
from shoal_agent.runtime.failures import RuntimeFailed, Stopper
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED, Prepared
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_agent.runtime.results import RunResult
from shoal_agent.runtime.whole_fragment import Whole
from shoal_agent.runtime.widening import Widening
from shoal_protocol.tensors import Array

PATIENCE_SECONDS = 60
X = {"x": np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)}
GRAPH_FACTOR = 12


class SlowWhole:
    """Opens when it may, unless it is stopped before."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.goes_on = threading.Event()
        self.is_stopped = False
        self.begun = 0

    def options(self, threads: int) -> "SlowWhole":
        if not self.may_open.is_set():
            self.goes_on.clear()
        return self

    def set_load_cancellation_flag(self, flag: bool) -> None:
        self.is_stopped = flag
        self.goes_on.set()

    def let_open(self) -> None:
        self.may_open.set()
        self.goes_on.set()

    def open(self, _: "SlowWhole") -> str:
        self.begun += 1
        assert self.goes_on.wait(PATIENCE_SECONDS)
        if not self.may_open.is_set():
            raise RuntimeFailed("stopped")
        return "open"


class Wide:
    """One fragment that is wanted whole."""

    def __init__(self) -> None:
        self.whole = SlowWhole()
        self.widening = Widening(threads=1)
        self.widening.want("f", cast(Whole, self.whole))

    def step(self) -> object:
        """`False`: what was tried has come to nothing."""
        step = self.widening.step("f")
        return step.result(PATIENCE_SECONDS) if isinstance(step, Future) else step


def test_a_fragment_is_taken_when_it_is_open_and_once() -> None:
    wide = Wide()
    opening = wide.widening.step("f")
    assert isinstance(opening, Future)
    assert wide.widening.under_way
    assert wide.widening.step("f") is opening, "it was begun twice"
    wide.whole.let_open()
    assert opening.result(PATIENCE_SECONDS)
    assert not wide.widening.under_way
    assert cast(str, wide.widening.step("f")) == "open"
    assert wide.widening.step("f") is None
    assert not wide.widening.wants("f")


def test_what_is_stopped_begins_again_and_is_waited_for_when_it_was_stopped_often() -> None:
    wide = Wide()
    for count in range(4):
        opening = wide.widening.step("f")
        wide.widening.stop()
        assert isinstance(opening, Future)
        assert opening.done()
        assert not opening.result()
        assert wide.whole.begun == count + 1
    opening = wide.widening.step("f")
    assert isinstance(opening, Future)
    threading.Timer(0.05, wide.whole.let_open).start()
    wide.widening.stop()
    assert opening.result(0)
    assert wide.step() == "open"


def test_what_is_open_outlives_a_stop_and_not_a_discard() -> None:
    wide = Wide()
    wide.whole.let_open()
    assert wide.step() is True
    wide.widening.stop()
    assert wide.step() == "open"
    wide = Wide()
    wide.widening.step("f")
    wide.widening.discard("f")
    assert wide.whole.is_stopped
    assert not wide.widening.under_way
    assert wide.step() is None


def test_what_cannot_be_opened_is_not_tried_again() -> None:
    wide = Wide()
    wide.whole.goes_on.set()
    wide.whole.options = lambda threads: wide.whole  # type: ignore[method-assign]
    assert wide.step() is False
    with pytest.raises(RuntimeFailed, match="stopped"):
        wide.widening.step("f")
    assert wide.step() is None


class Grown:
    """A fragment in blocks, in an agent's runtime."""

    def __init__(self, folder: Path, beyond: int = 3 * MIB, resident: int = 24 * MIB) -> None:
        in_blocks = InBlocks(8, held_bytes=384 << 10, working_bytes=2 * MIB)
        self.made = write_fragment(folder, dense_model([512] * 9), resident, in_blocks)
        self.least = self.made.least_bytes + beyond
        self.meter = MemoryMeter()
        self.runtime = Runtime(self.meter, threads=1, limit_bytes=AMPLE)

    def settle(self, prepared: Prepared) -> None:
        """Take the floor when what libraries allocate once is part of it. What tests before this
        one have left in the process is never this fragment's."""
        self.meter.settle()
        for size in (self.least, self.made.resident_bytes, self.least):
            self.runtime.open("f", self.made.folder, size, prepared)
            self.run(AMPLE)
            self.runtime.close("f")
        self.meter.settle(LIBRARY_RESERVE_BYTES)

    def open(self, prepared: Prepared = NOTHING_PREPARED) -> None:
        self.settle(prepared)
        self.runtime.open("f", self.made.folder, self.least, prepared)

    def run(self, limit_bytes: int | None = None) -> np.ndarray[Any, Any]:
        result = self.runtime.run("f", X, Stopper(), limit_bytes).outputs["y"]
        return np.array(result)

    @property
    def is_whole(self) -> bool:
        return self.runtime.weight_bytes("f") > 0

    def finish(self) -> None:
        while (opening := self.runtime.widen("f")) is not None:
            opening.result(PATIENCE_SECONDS)


async def prepared_in_both_ways(folder: Path, made: MadeFragment) -> Prepared:
    preparation = Bench(folder).preparation
    await preparation.prepare(made.digest, made.folder, made.least_bytes + 3 * MIB)
    both = await preparation.prepare(made.digest, made.folder, made.resident_bytes)
    assert both.whole is not None
    assert both.blocks is not None
    return both


@pytest.mark.parametrize("is_prepared", [True, False])
async def test_inputs_run_in_blocks_within_the_grant_until_the_whole_is_open(
    tmp_path: Path, is_prepared: bool
) -> None:
    grown = Grown(tmp_path)
    prepared = NOTHING_PREPARED
    if is_prepared:
        prepared = await prepared_in_both_ways(tmp_path, grown.made)
    grown.open(prepared)
    first = grown.run()
    grown.runtime.grant("f", grown.made.resident_bytes)
    assert not grown.is_whole, "the input waited for it"
    for _ in range(3):
        np.testing.assert_allclose(grown.run(), first, rtol=1e-4, atol=1e-5)
    while (opening := grown.runtime.widen("f")) is not None:
        assert not grown.runtime.pack("f"), "what goes soon need not be packed"
        while not opening.done():
            np.testing.assert_allclose(grown.run(), first, rtol=1e-4, atol=1e-5)
        assert not grown.is_whole, "nobody asked for it"
    assert grown.is_whole
    np.testing.assert_allclose(grown.run(), first, rtol=1e-4, atol=1e-5)
    assert grown.meter.peak_bytes() <= grown.made.resident_bytes
    assert mapped_bytes(grown.made, "prepared/" if is_prepared else "weights.bin") == (8 * MIB, 0)
    grown.runtime.grant("f", grown.made.resident_bytes)
    assert grown.runtime.widen("f") is None


async def test_blocks_that_were_prepared_are_not_given_up_for_a_whole_that_was_not(
    tmp_path: Path,
) -> None:
    """It would run slower than they do."""
    grown = Grown(tmp_path)
    both = await prepared_in_both_ways(tmp_path, grown.made)
    grown.open(replace(both, whole=None))
    grown.runtime.grant("f", grown.made.resident_bytes)
    assert grown.runtime.widen("f") is None
    grown.run()
    assert grown.runtime.run("f", X, Stopper()).streamed_bytes == 0, "not all stays in memory"
    assert not grown.is_whole


def test_where_both_have_no_room_the_blocks_go_first(tmp_path: Path) -> None:
    grown = Grown(tmp_path, beyond=0)
    room = grown.made.resident_bytes - grown.made.least_bytes
    model = grown.made.folder / "model.onnx"
    content = model.read_bytes()
    # A field that no reader knows makes it larger.
    size = room // GRAPH_FACTOR + 1 - len(content)
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, 0])
    model.write_bytes(content + b"\xfa\x07" + length + bytes(size))
    grown.open()
    grown.runtime.grant("f", grown.made.resident_bytes)
    assert grown.is_whole


@pytest.mark.parametrize("what", ["less", "close"])
def test_nothing_is_left_of_what_is_not_wanted_any_more(tmp_path: Path, what: str) -> None:
    grown = Grown(tmp_path)
    grown.open()
    first = grown.run()
    for _ in range(20):
        grown.runtime.grant("f", grown.made.resident_bytes)
        assert grown.runtime.widen("f") is not None
        if what == "close":
            grown.runtime.close("f")
            assert mapped_bytes(grown.made, "weights.bin") is None
            grown.runtime.open("f", grown.made.folder, grown.least)
        else:
            grown.runtime.grant("f", grown.least)
            assert grown.runtime.widen("f") is None
        assert not grown.runtime.opens_beside
        assert np.array_equal(grown.run(), first)
        assert "open" not in [thread.name for thread in threading.enumerate()]
    grown.runtime.close("f")
    grown.meter.give_back()
    assert grown.meter.used_bytes() < 3 * MIB


async def test_a_guarded_run_has_all_that_there_is_and_the_whole_is_opened_after_it(
    tmp_path: Path,
) -> None:
    grown = Grown(tmp_path)
    grown.open(await prepared_in_both_ways(tmp_path, grown.made))
    first = grown.run()
    grown.runtime.grant("f", grown.made.resident_bytes)
    assert grown.runtime.widen("f") is not None
    result = grown.run(limit_bytes=32 * MIB)
    assert not grown.runtime.opens_beside
    np.testing.assert_allclose(result, first, rtol=1e-4, atol=1e-5)
    grown.finish()
    assert grown.is_whole
    np.testing.assert_allclose(grown.run(), first, rtol=1e-4, atol=1e-5)


async def test_a_whole_whose_files_are_gone_leaves_the_blocks(tmp_path: Path) -> None:
    grown = Grown(tmp_path)
    both = await prepared_in_both_ways(tmp_path, grown.made)
    grown.open(both)
    first = grown.run()
    assert both.whole is not None
    both.whole.model.unlink()
    grown.runtime.grant("f", grown.made.resident_bytes)
    grown.finish()
    assert not grown.is_whole
    np.testing.assert_allclose(grown.run(), first, rtol=1e-4, atol=1e-5)


def grants_in_an_order(folder: Path, seed: int) -> tuple[list[tuple[int, int]], bool]:
    """Which steps of 150 took more than was granted, and whether the fragment was whole at last."""
    grown = Grown(folder)
    grown.open(asyncio.run(prepared_in_both_ways(folder, grown.made)))
    first, chance = grown.run(), np.random.default_rng(seed)
    granted, most = grown.least, grown.made.resident_bytes
    excesses = []
    for step in chance.integers(0, 6, 150):
        if step == 0:
            granted = int(
                chance.choice([grown.least, most, int(chance.integers(grown.least, most))])
            )
            grown.runtime.grant("f", granted)
        elif step == 1:
            grown.runtime.pack("f")
        elif step == 2:
            grown.runtime.widen("f")
        limit = 32 * MIB if step == 3 else None
        grown.meter.begin_peak()
        np.testing.assert_allclose(grown.run(limit), first, rtol=1e-4, atol=1e-5)
        if (peak := grown.meter.peak_since_begin_bytes()) > granted:
            excesses.append((int(step), peak - granted))
    grown.runtime.grant("f", most)
    grown.finish()
    return excesses, grown.is_whole


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.minutes) for n in (1, 2, 3))]
)
def test_in_whatever_order_grants_come_each_is_kept_and_no_output_differs(
    tmp_path: Path, seed: int
) -> None:
    excesses, is_whole = in_own_process(grants_in_an_order, tmp_path, seed)
    assert not excesses
    assert is_whole


class Watching(Runtime):
    """Says of each run whether it was of a whole fragment, and guarded."""

    runs: list[tuple[bool, bool]]
    busy: threading.Event | None = None

    def run(
        self,
        digest: str,
        tensors: Mapping[str, Array],
        stopper: Stopper,
        limit_bytes: int | None = None,
        **known: Any,
    ) -> RunResult:
        self.runs.append((self.weight_bytes(digest) > 0, limit_bytes is not None))
        if self.busy is not None:
            assert self.busy.wait(PATIENCE_SECONDS)
        return super().run(digest, tensors, stopper, limit_bytes, **known)


@pytest.fixture
def made(tmp_path: Path) -> MadeFragment:
    return write_fragment(tmp_path, dense_model([512] * 9), 24 * MIB, InBlocks(8))


@pytest.fixture
def watching() -> type[Watching]:
    Watching.runs = []
    return Watching


@pytest.fixture
def fragments(tmp_path: Path, made: MadeFragment, watching: type[Watching]) -> Iterator[Fragments]:
    with Thread(1) as thread:
        yield make_fragments(tmp_path, thread, kind=watching)


async def test_inputs_run_while_a_budget_grows_and_the_first_of_each_way_is_guarded(
    fragments: Fragments, made: MadeFragment, watching: type[Watching]
) -> None:
    await fragments.load(made.digest, made.resident_bytes, [])
    first = (await fragments.run(made.digest, X)).outputs["y"]
    await fragments.change_budget(8 * MIB)
    await fragments.run(made.digest, X)
    await fragments.change_budget(64 * MIB)
    await fragments.run(made.digest, X)
    assert not watching.runs[-1][0], "the whole was waited for"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not watching.runs[-1][0]:
            outputs = (await fragments.run(made.digest, X)).outputs["y"]
            np.testing.assert_allclose(outputs, first, rtol=1e-4, atol=1e-5)
    whole, in_blocks = (True, True), (False, True)
    guarded = [each for each in watching.runs if each[1]]
    assert guarded == [whole, in_blocks, in_blocks, whole], "nobody knows what each takes"
    assert fragments.ledger.resident[made.digest] == made.resident_bytes
    await fragments.unload(made.digest)
    await fragments.close()


async def test_what_a_run_shows_that_began_before_a_change_says_nothing_of_those_after_it(
    fragments: Fragments,
    made: MadeFragment,
    watching: type[Watching],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = threading.Event()
    monkeypatch.setattr(watching, "busy", busy)
    await fragments.load(made.digest, made.resident_bytes, [])
    running = asyncio.create_task(fragments.run(made.digest, X))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not watching.runs:
            await asyncio.sleep(0)
    fragments.processor.note_change(made.digest)
    busy.set()
    for each in (running, fragments.run(made.digest, X), fragments.run(made.digest, X)):
        await each
    assert [guarded for _, guarded in watching.runs] == [True, True, False]
    await fragments.unload(made.digest)
    await fragments.close()
