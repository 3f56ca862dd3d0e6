"""A run of some milliseconds happens in the event loop, where the device has rested as long."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.in_process import MIB, Thread
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.results import Passed, RunResult
from shoal_protocol.tensors import Array

SHORT_SECONDS = 0.004
LONG_SECONDS = 0.02
X = {"x": np.ones((1, 512), np.float32)}


class Timed(Runtime):
    """Its runs have taken what the test says, whatever they take."""

    seconds = SHORT_SECONDS
    streamed_bytes = 0
    peak_bytes = 0
    dropped: Sequence[str] = ()

    def run(self, *arguments: Any, **known: Any) -> RunResult:
        ran = super().run(*arguments, **known)
        return replace(ran, compute_seconds=self.seconds, streamed_bytes=self.streamed_bytes)

    def run_in_passing(self, digest: str, items: Sequence[Mapping[str, Array]]) -> Passed | None:
        passed = super().run_in_passing(digest, items)
        return None if passed is None else passed._replace(seconds=self.seconds)

    def peak_in_passing(self, digest: str) -> int:
        return self.peak_bytes

    def weight_bytes(self, digest: str) -> int:
        return 60 * MIB

    def table_bytes(self, digest: str) -> int:
        return 60 * MIB  # items read rows of all

    def drop_weights(self, digest: str) -> None:
        self.dropped = (*self.dropped, digest)


class Device:
    """A fragment on a device that has run it before, and does not rest."""

    def __init__(self, make: Callable[..., Fragments], processor: Thread, digest: str) -> None:
        self.now = 0.0
        self.fragments = make(kind=Timed, clock=lambda: self.now)
        self.digest, self._processor = digest, processor

    @property
    def runtime(self) -> Timed:
        runtime = self.fragments._runtime
        assert isinstance(runtime, Timed)
        return runtime

    async def begin(self) -> None:
        await self.fragments.load(self.digest, 8 * MIB, [])
        for _ in range(3):
            await self.fragments.run(self.digest, X)

    async def runs_here(self) -> bool:
        given = self._processor.given
        await self.fragments.run(self.digest, X)
        return self._processor.given == given

    def pass_by(self, items: int = 1) -> Passed | None:
        return self.fragments.light.run(self.digest, [X] * items)


@pytest.fixture
async def device(make: Callable[..., Fragments], processor: Thread, tmp_path: Path) -> Device:
    made: MadeFragment = write_fragment(tmp_path, dense_model([512, 512]), 8 * MIB)
    return Device(make, processor, made.digest)


async def test_a_short_run_happens_here_where_the_device_has_rested_as_long(
    device: Device,
) -> None:
    await device.begin()
    assert not await device.runs_here()
    device.now += SHORT_SECONDS
    assert await device.runs_here()
    assert not await device.runs_here()
    device.now += SHORT_SECONDS / 2
    assert not await device.runs_here()


async def test_messages_wait_for_no_long_run_however_long_the_device_has_rested(
    device: Device,
) -> None:
    await device.begin()
    device.runtime.seconds = LONG_SECONDS
    device.now += 1
    assert await device.runs_here()  # nobody knew
    device.now += 1
    assert not await device.runs_here()
    device.now += 1
    assert not await device.runs_here()
    device.runtime.seconds = SHORT_SECONDS
    assert not await device.runs_here()
    device.now += 1
    assert await device.runs_here()


async def test_messages_wait_for_nothing_that_is_streamed(device: Device) -> None:
    await device.begin()
    device.runtime.streamed_bytes = MIB
    assert not await device.runs_here()
    device.now += 1
    assert not await device.runs_here()


async def test_an_item_larger_than_was_planned_for_never_runs_here(
    make: Callable[..., Fragments], processor: Thread, tmp_path: Path
) -> None:
    """However often it has: there may be more beside it than there was."""
    made = write_fragment(tmp_path, dense_model([512, 512]), 20 * MIB, largest={"x": (1, 512)})
    device = Device(make, processor, made.digest)
    await device.fragments.load(made.digest, 20 * MIB, [])
    larger = {"x": np.ones((4, 512), np.float32)}
    for _ in range(3):
        device.now += 1
        await device.fragments.run(made.digest, X)
        given, device.now = processor.given, device.now + 1
        await device.fragments.run(made.digest, larger)
        assert processor.given > given
    device.now += 1
    assert await device.runs_here()


async def test_an_item_passes_by_alone_and_after_a_rest_only(device: Device) -> None:
    await device.begin()
    assert device.pass_by() is None
    device.now += 1
    assert device.pass_by(2) is None
    passed = device.pass_by()
    assert passed is not None
    assert passed.outputs[0]["y"].shape == (1, 512)
    assert device.pass_by() is None


async def test_rows_that_have_gathered_leave_behind_an_item_that_passed_by(
    device: Device,
) -> None:
    await device.begin()
    for peak_bytes, dropped in ((MIB, 0), (1 << 30, 1)):
        device.now += 1
        passed = device.pass_by()
        assert passed is not None
        device.runtime.peak_bytes = peak_bytes
        await device.fragments.light.note(device.digest, passed)
        assert len(device.runtime.dropped) == dropped
    device.now += 1
    assert not await device.runs_here()
