"""Residency Single while a real job runs: what the kernel says is mapped, from moment to moment."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx
import pytest
from pool import cut, read_results, running_pool, write_items

from agent.fragment_making import dense_model
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_protocol.v1 import coordinator_pb2 as pb

pytestmark = pytest.mark.real

FRAGMENTS, ITEMS, JOBS = 3, 4, 4
MOST_JOBS = 30
"""A machine that is busy with other tests may look too seldom for a few."""


def mapped_weights(process: int) -> frozenset[str]:
    """Fragments whose weights a process has mapped now, all at one moment.

    The kernel gives a process's mappings in pieces, between which they may change: the process is
    held while they are read.
    """
    os.kill(process, signal.SIGSTOP)
    try:
        threads = [Path(path) / "stat" for path in Path(f"/proc/{process}/task").iterdir()]
        while any(not is_stopped(thread) for thread in threads):
            pass
        text = Path(f"/proc/{process}/maps").read_text()
    finally:
        os.kill(process, signal.SIGCONT)
    # As it was cut, or as it was prepared, in folders below.
    return frozenset(re.findall(r"/fragments/(\w+)/.*weights\.bin$", text, re.MULTILINE))


def is_stopped(thread: Path) -> bool:
    """A thread that has ended counts as well."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return thread.read_text().rpartition(")")[2].split()[0] in "TtZX"
    return True


def nothing_mapped(seen: list[frozenset[str]]) -> int:
    """How often it was seen that none was mapped, but for the beginning."""
    return seen[1:].count(frozenset())


@contextlib.contextmanager
def sampled(process: int) -> Iterator[list[frozenset[str]]]:
    """What is mapped, as often as a thread can look that lets the process run for as long as it was
    stopped: without, it might never run. The same twice in a row counts once."""
    seen: list[frozenset[str]] = [frozenset()]
    over = threading.Event()

    def look() -> None:
        stopped_seconds = 0.0
        while not over.wait(stopped_seconds):
            began = perf_counter()
            if (now := mapped_weights(process)) != seen[-1]:
                seen.append(now)
            stopped_seconds = perf_counter() - began

    thread = threading.Thread(target=look, name="sampler")
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


async def test_under_single_no_moment_of_a_job_has_two_fragments_mapped(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(dense_model([512] * (2 * FRAGMENTS + 1), batch=1), model)
    items: list[dict[str, np.ndarray]] = [
        {"x": np.random.default_rng(seed).standard_normal((1, 512), dtype=np.float32)}
        for seed in range(ITEMS)
    ]
    inputs = write_items(tmp_path / "in", items)
    devices = [{"name": "one", "memory": "48Mi"}]
    async with running_pool(tmp_path / "pool", devices, residency="Single", cgroups=False) as pool:
        document = cut(model, pool.store, FRAGMENTS)
        digests = {each.digest.removeprefix("sha256:") for each in document.fragments}
        assert len(digests) == FRAGMENTS
        with sampled(pool.process_id("one")) as seen:
            for number in range(MOST_JOBS):
                status = await pool.run(f"job-{number}", document, inputs, tmp_path / str(number))
                assert (status.state, status.succeeded) == (pb.JobStatus.COMPLETE, ITEMS), status
                jobs = range(number + 1)
                if (
                    number + 1 >= JOBS
                    and set().union(*seen) == digests
                    and nothing_mapped(seen) > 1
                ):
                    break
    for number in jobs:
        results = read_results(tmp_path / str(number))
        for given, right in zip(results, whole(model, items), strict=True):
            assert largest_difference(given, right) <= TOLERANCE
    together = [fragments for fragments in seen if len(fragments) > 1]
    assert not together
    # The looks were close enough together to see each of them, and times without any.
    assert set().union(*seen) == digests
    assert nothing_mapped(seen) > 1
