"""One way to run a model, measured in a process of its own: what `memory.py` starts.

python bench/memory_ways.py TASK    # JSON: the fields of `Task`; prints a list of lists
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import onnxruntime
from measurement import alternate, timed
from memory_items import SUBJECTS, Tensors
from memory_peers import PeerUnable, check_installed, check_same, ncnn_run, openvino_run

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.prepared import Prepared
from shoal_agent.runtime.process_memory import MemoryMeter, drop_library_pages, tune_allocator

MIB = 1 << 20
RUNS = 5
COLD_RUNS = 5
Run = Callable[[], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is measured. `way` is `default`, `mapped`, `granted`, `ncnn` or `openvino`. `model` is
    what it reads, `original` the ONNX file. `what`:

    `peak`: the most memory above the floor, in bytes, over some runs;
    `times`: of the way and of the default in turns, with the weights in the page cache;
    `cold`: to open and run once with nothing in the page cache; then of runs that begin so;
    `prepare`: to prepare the fragment, the bytes that this takes on disk, and the fragment's own;
    `adapt`: to adopt another grant for blocks, there and back; then, in turns, the longest part of
    becoming whole, between two of which items run; those items; and to adopt blocks again;
    `limited`: of runs within a limit that is set when the floor is known (`memory_limits`).
    """

    model: str
    original: str
    name: str
    cache: str
    digest: str
    way: str
    threads: int
    what: str
    granted_bytes: int = 0
    least_bytes: int = 0
    resident_bytes: int = 0
    turns: int = 0


class WayFailed(Exception):
    """A child could not measure; `status` is how it ended."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text or f"ended with status {status}")
        self.status = status


def in_child(task: Task) -> list[list[float]]:
    """Raises `WayFailed`."""
    command = [sys.executable, __file__, json.dumps(asdict(task))]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise WayFailed(made.returncode, made.stderr.strip().rpartition("\n")[2])
    result: list[list[float]] = json.loads(made.stdout.splitlines()[-1])
    return result


# ---- in a child process --------------------------------------------------------------------------


class Granted:
    """The agent's own runtime with the fragment."""

    def __init__(self, task: Task, meter: MemoryMeter) -> None:
        self._task = task
        self._granted_bytes = task.granted_bytes
        limit_bytes = max(task.granted_bytes, 64 * MIB)
        self.runtime = Runtime(
            meter,
            threads=task.threads,
            limit_bytes=limit_bytes,
            free=lambda: limit_bytes - self._granted_bytes,
        )
        drop_library_pages()
        self.runtime.rehearse()
        self._cache = FragmentCache(Path(task.cache), 1 << 40)
        self.folder = self._cache.folder / task.digest.removeprefix("sha256:")
        self.feeds = SUBJECTS[task.name].inputs()

    def prepare(self, granted_bytes: int | None = None) -> Prepared:
        """The form that runs in what is granted."""
        preparation = Preparation(self._cache, lambda _: True, lambda _: None)
        size = self._task.granted_bytes if granted_bytes is None else granted_bytes
        return asyncio.run(preparation.prepare(self._task.digest, self.folder, size))

    def open(self, prepared: Prepared) -> None:
        self.runtime.open(self._task.digest, self.folder, self._task.granted_bytes, prepared)

    def grant(self, size_bytes: int) -> None:
        self._granted_bytes = size_bytes
        self.runtime.grant(self._task.digest, size_bytes)

    def widen(self, meanwhile: Callable[[], None]) -> float:
        """Have the whole take the place of the blocks, once it is open, and run items until then;
        for how long at a time an item could not have run."""
        longest, opening = 0.0, None
        while True:
            started = perf_counter()
            opening = self.runtime.widen(self._task.digest)
            longest = max(longest, perf_counter() - started)
            if opening is None:
                return longest
            while not opening.done():
                meanwhile()

    def pack(self) -> None:
        """All that is left."""
        while self.runtime.pack(self._task.digest):
            pass

    def drop_weights(self) -> None:
        self.runtime.drop_weights(self._task.digest)

    def run(self) -> list[Any]:
        return list(self.runtime.run(self._task.digest, self.feeds, Stopper()).outputs.values())


def measure(task: Task) -> list[list[float]]:
    """Raises `PeerUnable`, and what the runtime raises."""
    meter = MemoryMeter()
    granted = Granted(task, meter)
    prepared = granted.prepare() if task.way == "granted" and task.what != "prepare" else None
    if task.way in ("ncnn", "openvino"):
        check_installed(task.way)
        __import__(task.way)
    feeds = granted.feeds

    def opened() -> Run:
        if prepared is None:
            return whole(task, feeds)
        granted.open(prepared)
        return granted.run

    meter.settle()
    match task.what:
        case "peak":
            return [[_peak(opened(), meter)]]
        case "times":
            return _times(task, opened(), feeds)
        case "cold":
            return _cold(task, granted, opened)
        case "prepare":
            return _prepare(granted)
        case "adapt":
            granted.open(granted.prepare(task.resident_bytes))
            return _adapt(task, granted)
        case "limited":
            return _limited(meter, task, granted, opened)
        case what:
            raise AssertionError(what)


def whole(task: Task, feeds: Tensors) -> Run:
    """The whole model in a way that is not ours."""
    model = Path(task.model)
    if task.way == "ncnn":
        return ncnn_run(model, feeds, task.threads)
    if task.way == "openvino":
        return openvino_run(model, feeds, task.threads)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = task.threads
    if task.way == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda: list(session.run(None, feeds))


def _peak(run: Run, meter: MemoryMeter) -> int:
    used = 0
    for _ in range(RUNS):
        run()
        used = max(used, meter.peak_bytes())
    return used


def _times(task: Task, run: Run, feeds: Tensors) -> list[list[float]]:
    default = whole(replace(task, way="default", model=task.original), feeds)
    for _ in range(2):
        check_same(run(), default())
    samples = alternate({"ours": timed(run), "default": timed(default)}, turns=task.turns)
    return [samples["ours"], samples["default"]]


def _cold(task: Task, granted: Granted, opened: Callable[[], Run]) -> list[list[float]]:
    files = (Path(task.model).parent, granted.folder)
    _forget(*files)
    started = perf_counter()
    run = opened()
    run()
    begun = perf_counter() - started
    runs = []
    for _ in range(COLD_RUNS if task.way == "granted" else 0):
        granted.drop_weights()
        _forget(*files)
        runs.append(timed(run)())
    return [[begun], runs]


def _forget(*folders: Path) -> None:
    """Have what these folders hold leave the page cache, unless it is mapped."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _prepare(granted: Granted) -> list[list[float]]:
    shutil.rmtree(granted.folder / "prepared", ignore_errors=True)
    before = _stored(granted.folder)
    started = perf_counter()
    granted.prepare()
    return [[perf_counter() - started, _stored(granted.folder) - before, before]]


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _adapt(task: Task, granted: Granted) -> list[list[float]]:
    granted.run()
    few, many = task.least_bytes, (task.least_bytes + task.resident_bytes) // 2
    among: list[float] = []
    for _ in range(max(1, task.turns // 5)):
        for size in (few, many):
            among.append(timed(partial(granted.grant, size))())
            granted.run()
    to_whole: list[float] = []
    meanwhile: list[float] = []
    to_blocks: list[float] = []
    for _ in range(max(1, task.turns // 5)):
        adopted = timed(partial(granted.grant, task.resident_bytes))()
        taken = granted.widen(lambda: meanwhile.append(timed(granted.run)()))
        to_whole.append(max(adopted, taken))
        granted.run()
        to_blocks.append(timed(partial(granted.grant, few))())
        granted.pack()
        granted.run()
    return [among, to_whole, meanwhile, to_blocks]


def _limited(
    meter: MemoryMeter, task: Task, granted: Granted, opened: Callable[[], Run]
) -> list[list[float]]:
    """Say the floor, wait until the limit is set, and run. Pages that others have read would be
    theirs: the limit would not count them."""
    print(meter.floor_bytes, flush=True)
    sys.stdin.readline()
    _forget(Path(task.model).parent, granted.folder)
    started = perf_counter()
    run = opened()
    run()
    begun = perf_counter() - started
    return [[begun], [timed(run)() for _ in range(task.turns)]]


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    if task.way == "granted":
        tune_allocator()  # as the agent does, and nobody else
    try:
        print(json.dumps(measure(task)))
    except PeerUnable as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
