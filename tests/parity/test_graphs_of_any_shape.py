"""Branches, skips, late inputs, control flow, random graphs cut at random places: real agents give
what the whole model gives."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool, read_results, running_pool, write_items

from made_models import TOPOLOGIES
from parity_with_whole import TOLERANCE, largest_difference, whole
from random_graphs import WIDTH, models
from real_models import Tensors
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout
from shoal_protocol.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

T = TypeVar("T")
NUMBERS = itertools.count()
HALF_TOLERANCE = 2e-3


class Runner:
    """A pool in a thread of its own, for tests that are no coroutines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop: asyncio.Event
        self.pool: Pool
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._live()])
        self._thread.start()
        assert self._started.wait(60)

    async def _live(self) -> None:
        self._stop = asyncio.Event()
        devices = [{"name": name, "memory": "256Mi"} for name in ("one", "two", "three")]
        async with running_pool(self._folder, devices, cgroups=False) as self.pool:
            self._started.set()
            await self._stop.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine of the pool."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(tmp_path_factory.mktemp("pool"))
    yield running
    running.close()


def check(
    runner: Runner,
    path: Path,
    choose: Callable[[Sequence[int]], Sequence[int]],
    items: list[Tensors],
    tolerance: float = TOLERANCE,
) -> None:
    """Cut at those that are chosen of the legal positions, run, compare."""
    profile = profile_model(path, {name: value.shape for name, value in items[0].items()})
    chosen = choose(Layout(profile).legal)
    document = cut_model(path, profile, tuple(chosen), runner.pool.store)
    number = next(NUMBERS)
    with TemporaryDirectory() as place:
        inputs = write_items(Path(place) / "in", items)
        status = runner.call(
            runner.pool.run(f"graph-{number}", document, inputs, Path(place) / "out")
        )
        assert status.state == pb.JobStatus.COMPLETE, status
        for given_, expected in zip(
            read_results(Path(place) / "out"), whole(path, items), strict=True
        ):
            assert largest_difference(given_, expected) <= tolerance


def into(fragments: int | None) -> Callable[[Sequence[int]], Sequence[int]]:
    """Cuts that are evenly spread, as many as there can be; None: at every legal position."""

    def choose(legal: Sequence[int]) -> Sequence[int]:
        if fragments is None or len(legal) < fragments:
            return legal
        return [legal[len(legal) * number // fragments] for number in range(1, fragments)]

    return choose


# Most have fewer legal positions than 3 or 5, and are then cut everywhere.
@pytest.mark.parametrize(
    "fragments", [None, *(pytest.param(each, marks=pytest.mark.minutes) for each in (2, 3, 5))]
)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_made_topology_in_two_three_five_and_cut_everywhere(
    runner: Runner, tmp_path: Path, name: str, fragments: int | None
) -> None:
    made = TOPOLOGIES[name]
    # The runtime computes half precision in single where neighbours share a session.
    tolerance = HALF_TOLERANCE if name == "half precision" else TOLERANCE
    items = [made.inputs(seed) for seed in (0, 1)]
    check(runner, made.save(tmp_path), into(fragments), items, tolerance)


@pytest.mark.minutes
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=models(), data=st.data())
def test_random_graphs_at_random_legal_cuts(
    runner: Runner, made: onnx.ModelProto, data: st.DataObject
) -> None:
    random = np.random.default_rng(0)
    items: list[Tensors] = [
        {
            each.name: random.uniform(-1, 1, (rows, WIDTH)).astype(np.float32)
            for each in made.graph.input
        }
        for rows in (3, 1)
    ]
    with TemporaryDirectory() as place:
        path = Path(place) / "model.onnx"
        onnx.save(made, path)
        profile = profile_model(path, {name: value.shape for name, value in items[0].items()})
        legal = Layout(profile).legal
        cuts = data.draw(st.sets(st.sampled_from(legal or (0,)), max_size=4)) if legal else set()
        check(runner, path, lambda _: sorted(cuts), items)
