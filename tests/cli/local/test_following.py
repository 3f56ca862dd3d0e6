"""A camera that streams in: `shoal run` takes files as they come, until Ctrl-C. Real processes."""

import itertools
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from cli.local.test_running import coordinators, until
from cli.local.workbench import WIDTH, Workbench, assert_results_are_the_whole_models

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


def drop(folder: Path, number: int) -> None:
    """A camera's frame: written beside, then renamed."""
    beside = folder / f".{number:06}.part"
    with beside.open("wb") as file:
        np.savez(file, x=np.full((1, WIDTH), number % 7 / 10, np.float32))
    beside.rename(folder / f"{number:06}.npz")


def results(bench: Workbench) -> dict[str, int]:
    """The results by name, and the file that each is."""
    return {path.name: path.stat().st_ino for path in bench.outputs.glob("*.npz")}


@pytest.fixture
def followed(bench: Workbench) -> Workbench:
    """The manifest's job follows its folder, in which there is one frame of each size."""
    text = bench.manifest.read_text()
    bench.manifest.write_text(text.replace("pvc://lines/in}", "pvc://lines/in, follow: true}"))
    for path in bench.inputs.iterdir():
        path.unlink()
    drop(bench.inputs, 0)
    return bench


def test_frames_that_stream_in_are_processed_once_over_a_restart_until_ctrl_c(
    followed: Workbench,
) -> None:
    process = followed.start(
        *("run", followed.manifest, "--report", followed.report, "--progress", "plain")
    )
    until(lambda: results(followed), process)
    stop = threading.Event()

    def film() -> None:
        for number in itertools.count(1):
            if stop.wait(0.02):
                return
            drop(followed.inputs, number)

    camera = threading.Thread(target=film)
    camera.start()
    try:
        until(lambda: len(results(followed)) > 20, process)
        before = results(followed)
        # Later groups of results are made only when these are noted.
        until(lambda: len(results(followed)) > len(before) + 120, process)
        os.kill(coordinators(followed.folder)[0], signal.SIGKILL)
        until(lambda: len(results(followed)) > len(before) + 200, process)
    finally:
        stop.set()
        camera.join()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "no further inputs are taken; once more to cancel what is left" in errors
    job = json.loads(followed.report.read_bytes())["jobs"][0]
    frames = len(list(followed.inputs.glob("*.npz")))
    assert (job["state"], job["items"], job["succeeded"]) == ("Complete", frames, frames)
    after = results(followed)
    assert {name: after[name] for name in before} == before, "no result was made twice"
    assert_results_are_the_whole_models(followed)


@pytest.mark.slow
def test_ctrl_c_twice_cancels_and_the_next_run_goes_on(followed: Workbench) -> None:
    text = followed.manifest.read_text()
    slow = text.replace("memory:", "link: {latencyMilliseconds: 200}, memory:", 3)
    followed.manifest.write_text(slow.replace("follow: true}", "follow: true}\n  parallelism: 1"))
    for number in range(1, 120):
        drop(followed.inputs, number)
    process = followed.start("run", followed.manifest, "--progress", "plain")
    until(lambda: len(results(followed)) > 3, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "no further inputs" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again to resume" in errors
    before = results(followed)
    assert len(before) < 120
    followed.manifest.write_text(text.replace("follow: true}", "follow: true}\n  end: true"))
    ran = followed.run("run", followed.manifest, "--report", followed.report)
    assert ran.status == 0, ran.err
    assert len(results(followed)) == 120
    assert_results_are_the_whole_models(followed)
