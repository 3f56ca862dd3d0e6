"""A camera that streams in, as docs/follow.md says it: `shoal run` takes files as they come, until
Ctrl-C. Real processes."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from cli.local.test_running import coordinators, until
from cli.local.workbench import WIDTH, Workbench

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "follow.md").read_text()


def example(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def frame(number: int) -> np.ndarray:
    return np.full((1, WIDTH), number % 7 / 10, np.float32)


def results(bench: Workbench) -> dict[str, int]:
    """The results by name, and the file that each is."""
    return {path.stem: path.stat().st_ino for path in (bench.folder / "detections").glob("*.npz")}


def frames(bench: Workbench) -> list[Path]:
    return sorted((bench.folder / "frames").glob("*.npy"))


def assert_each_frame_has_its_result(bench: Workbench) -> None:
    session = onnxruntime.InferenceSession(str(bench.model), providers=["CPUExecutionProvider"])
    assert sorted(results(bench)) == [path.stem for path in frames(bench)]
    for path in frames(bench):
        (whole,) = session.run(None, {"x": np.load(path)})
        with np.load(bench.folder / "detections" / f"{path.stem}.npz") as made:
            np.testing.assert_allclose(made["y"], whole, rtol=0, atol=1e-5)


@pytest.fixture
def followed(bench: Workbench) -> Workbench:
    """The page's job, of the bench's model."""
    others = bench.manifest.read_text().rpartition("---\n")[0]
    bench.manifest.write_text(f"{others}---\n{example('yaml').replace('detector', 'small')}")
    return bench


def interrupt_twice(process: "subprocess.Popen[str]") -> str:
    """End a run that follows its inputs, then cancel it; what it says after the first."""
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "no further inputs" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)[1]


@pytest.fixture
def store(followed: Workbench) -> Callable[[int], None]:
    """The page's camera; its first frame is there, so that the model is planned for its size."""
    names: dict[str, Any] = {}
    exec(example("python"), names)  # noqa: S102 - the page's own example
    names["FRAMES"] = followed.folder / names["FRAMES"]
    names["FRAMES"].mkdir()

    def film(number: int) -> None:
        names["store"](number, frame(number))

    film(0)
    return film


def test_frames_that_stream_in_are_processed_once_over_a_restart_until_ctrl_c(
    followed: Workbench, store: Callable[[int], None]
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
            store(number)

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
    filmed = len(frames(followed))
    assert (job["state"], job["items"], job["succeeded"]) == ("Complete", filmed, filmed)
    after = results(followed)
    assert {name: after[name] for name in before} == before, "no result was made twice"
    assert_each_frame_has_its_result(followed)


@pytest.mark.slow
@pytest.mark.minutes
def test_ctrl_c_twice_cancels_and_the_next_run_goes_on(
    followed: Workbench, store: Callable[[int], None]
) -> None:
    text = followed.manifest.read_text()
    slow = text.replace("memory:", "link: {latencyMilliseconds: 200}, memory:", 3)
    followed.manifest.write_text(f"{slow}  parallelism: 1\n")
    for number in range(1, 120):
        store(number)
    process = followed.start("run", followed.manifest, "--progress", "plain")
    until(lambda: len(results(followed)) > 3, process)
    errors = interrupt_twice(process)
    assert process.returncode == 130, errors
    assert "run the same command again to resume" in errors
    before = results(followed)
    assert len(before) < 120
    followed.manifest.write_text(f"{text}  end: true\n")
    ran = followed.run("run", followed.manifest, "--report", followed.report)
    assert ran.status == 0, ran.err
    assert len(results(followed)) == 120
    assert_each_frame_has_its_result(followed)
