"""What the bench of streaming computes from its runs, and which runs it refuses."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from itertools import accumulate
from pathlib import Path
from time import sleep
from typing import cast

import foreign
import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peers import STAGES, tiny_model
from pool import Pool, cut
from steady import alone, stage_inputs, steady_rate, streaming_bound
from streaming import Bench, batches, starts

from shoal_protocol.partition import PartitionDocument, document_from_json, document_to_json
from shoal_protocol.v1 import coordinator_pb2 as pb

SECONDS = st.floats(0.001, 10)
PIPELINES = st.lists(SECONDS, min_size=1, max_size=6)


def ends(stage_seconds: list[float], items: int) -> list[float]:
    """When each item leaves the last stage of a pipeline that begins at 0."""
    free = [0.0] * len(stage_seconds)
    ended = []
    for _ in range(items):
        at = 0.0
        for stage, seconds in enumerate(stage_seconds):
            at = free[stage] = max(at, free[stage]) + seconds
        ended.append(at)
    return ended


@given(PIPELINES, st.integers(4, 200))
def test_the_steady_rate_of_a_pipeline_is_that_of_its_slowest_stage(
    stage_seconds: list[float], items: int
) -> None:
    assert steady_rate(ends(stage_seconds, items)) == pytest.approx(1 / max(stage_seconds))


def test_a_slow_begin_and_a_slow_end_are_cut_off() -> None:
    steady = list(accumulate([0.5] * 80, initial=30.0))[1:]
    filling, draining = [10.0 + item for item in range(10)], [80.0 + item for item in range(10)]
    assert steady_rate([*draining, *steady, *filling]) == pytest.approx(2.0)


@given(PIPELINES, st.integers(1, 50))
def test_the_bound_of_streaming_is_what_a_pipeline_without_any_cost_takes(
    stage_seconds: list[float], items: int
) -> None:
    barrier = items * sum(stage_seconds)
    taken = ends(stage_seconds, items)[-1]
    assert streaming_bound(stage_seconds, items) == pytest.approx(taken / barrier)


def test_a_stage_alone_is_a_model_that_computes_what_it_computes_in_the_pipeline(
    tmp_path: Path,
) -> None:
    model, store = tiny_model(tmp_path), tmp_path / "store"
    document = cut(model, store, STAGES, {"x0": (1, 64)})
    random = np.random.default_rng(0)
    items = [{"x0": random.standard_normal((1, 64)).astype(np.float32)} for _ in range(3)]
    taken = stage_inputs(document, store, items)
    for stage, fragment in enumerate(document.fragments):
        single = document_from_json(document_to_json(alone(document, stage)))
        assert [each.digest for each in single.fragments] == [fragment.digest]
        assert all(feed.keys() == {spec.name for spec in single.inputs} for feed in taken[stage])
    last = document.fragments[-1].digest.removeprefix("sha256:")
    end = onnxruntime.InferenceSession(str(store / "fragments" / last / "model.onnx"))
    whole = onnxruntime.InferenceSession(str(model))
    for item, feed in zip(items, taken[-1], strict=True):
        np.testing.assert_allclose(end.run(None, feed)[0], whole.run(None, item)[0], rtol=1e-5)


def test_what_others_take_is_what_the_machine_does_beyond_the_run_s_own_processes() -> None:
    assert foreign.foreign_share(busy=3.0, own=1.0, elapsed=10.0, processors=2) == 0.1
    assert foreign.foreign_share(busy=1.0, own=1.01, elapsed=10.0, processors=2) == 0.0
    stat = "cpu  100 1 20 5000 400 3 2 4 7 7\ncpu0 50 0 10 2500 200 1 1 2 3 3\n"
    assert foreign.busy_seconds(stat) == pytest.approx(1.30)


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that is not the bench's own, and takes a processor."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            yield
        finally:
            busy.kill()


def wait_while_it_works() -> None:
    began = foreign.busy_seconds()
    while foreign.busy_seconds() < began + 0.5:
        sleep(0.01)


def test_a_run_beside_a_process_that_is_not_its_own_is_refused() -> None:
    def run() -> None:
        with foreign.refused(lambda: ()):
            wait_while_it_works()

    with busy_neighbour(), pytest.raises(foreign.ForeignLoad, match="--loaded"):
        run()


class IdlePool:
    """Has jobs that take no work of this machine, and some of its time (as `Pool`)."""

    device_names = ()

    async def run(self, *_: object, **how: object) -> pb.JobStatus:
        wait_while_it_works()
        return pb.JobStatus(state=pb.JobStatus.COMPLETE)

    async def restart(self, name: str) -> None:
        raise AssertionError("there are no devices")

    def process_id(self, name: str) -> int:
        return os.getpid()


@pytest.mark.parametrize("measure", [starts, batches])
async def test_whatever_is_measured_beside_others_is_refused(
    measure: Callable[[Bench, str, int], Awaitable[object]], tmp_path: Path
) -> None:
    bench = Bench(
        pool=cast("Pool", IdlePool()),
        document=cast("PartitionDocument", None),
        homes=(),
        few=tmp_path / "few",
        label="direct",
        loaded=False,
    )
    with busy_neighbour(), pytest.raises(foreign.ForeignLoad):
        await measure(bench, "", 1)
