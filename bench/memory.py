"""What a model takes in memory and time in less than it needs, against ONNX Runtime.

Each model is one fragment, as `shoal run MODEL --devices 1 --budget BUDGET` makes it, run by the
agent's own runtime within several grants, from the smallest that it can run in to all it needs. The
peers are ONNX Runtime's default load, and one with the weights mapped from the file and nothing
packed. Memory: each way in a process of its own, the peak above the floor of an idle agent over
five runs, by the kernel's mark. Time: ours and the default in turns in one process, weights in the
page cache. FlexNN (table 2) reports 93.81 % less for ResNet-152 at 1.036 times the latency, and
92.95 % at 1.03 for VGG-19: those are the goals.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
from measurement import (
    RATIO,
    Arguments,
    Goal,
    Measurement,
    Report,
    alternate,
    argument_parser,
    compared,
    timed,
)
from zoo.materialise import materialise

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.process_memory import MemoryMeter, drop_library_pages, tune_allocator
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_protocol.partition import Fragment

MIB = 1 << 20
TURNS = 25
RUNS = 5
GRANTS = 6
Tensors = dict[str, npt.NDArray[np.generic]]


def image(name: str) -> Tensors:
    pixels = np.random.default_rng(0).uniform(-1, 1, (1, 3, 224, 224))
    return {name: pixels.astype(np.float32)}


def text(*masks: str) -> Tensors:
    tokens: Tensors = {"input_ids": np.random.default_rng(0).integers(1000, 20_000, (1, 128))}
    return tokens | {name: np.ones((1, 128), np.int64) for name in masks}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo, one item, and what is aimed at: shares of the default's peak and time."""

    inputs: Callable[[], Tensors]
    peak: float | None = None
    time: float | None = None


SUBJECTS = {
    "mobilenet_v2": Subject(lambda: image("image"), time=1.05),
    "squeezenet1_1": Subject(lambda: image("image"), time=1.05),
    "resnet152": Subject(lambda: image("image"), peak=0.0619, time=1.036),
    "vgg19": Subject(lambda: image("image"), peak=0.0705, time=1.03),
    "distilbert_sst2": Subject(lambda: text("attention_mask"), peak=0.1, time=1.05),
    "vit_base_16": Subject(lambda: image("image"), peak=0.1, time=1.05),
    "gpt2": Subject(text, peak=0.1, time=1.05),
}
QUICK = ("mobilenet_v2",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a child process measures: `way` is `default`, `mapped` or `granted`; without `turns` the
    peak, else the times of the way and of the default."""

    model: str
    name: str
    cache: str
    digest: str
    way: str
    threads: int
    granted_bytes: int = 0
    turns: int = 0


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", action="append", choices=[*SUBJECTS], help="only these models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--task", help="what a child process of this bench measures")
    options = parser.parse_args()
    if options.task is not None:
        print(json.dumps(measure(Task(**json.loads(options.task)))))
        return
    report = Report(Arguments(json=options.json, quick=options.quick))
    for name in options.model or (QUICK if options.quick else SUBJECTS):
        with store() as folder:
            compare(report, name, folder, options.threads)
    report.finish()


@contextmanager
def store() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shoal-memory-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(report: Report, name: str, folder: Path, threads: int) -> None:
    subject = SUBJECTS[name]
    path = materialise(name, Path(tempfile.gettempdir()) / f"shoal-zoo-{os.getuid()}")
    profile = profile_model(path, {key: each.shape for key, each in subject.inputs().items()})
    (fragment,) = cut_model(path, profile, (), folder).fragments
    by_default = Task(
        model=str(path),
        name=name,
        cache=str(folder),
        digest=fragment.digest,
        way="default",
        threads=threads,
    )
    default, mapped = peak(by_default), peak(replace(by_default, way="mapped"))
    report.add(Measurement(name=f"{name}: default, peak", value=default / MIB, unit="MiB"))
    report.add(
        Measurement(
            name=f"{name}: mapped, peak",
            value=mapped / MIB,
            unit="MiB",
            peer=default / MIB,
            ratio=mapped / default,
        )
    )
    for granted in grants(fragment, 2 if report.quick else GRANTS):
        task = replace(by_default, way="granted", granted_bytes=granted)
        used = peak(task)
        title = f"{name} granted {granted / MIB:.0f} MiB"
        least = granted == fragment.least_bytes
        report.add(
            Measurement(
                name=f"{title}: peak",
                value=used / MIB,
                unit="MiB",
                peer=default / MIB,
                ratio=used / default,
                goal=goal(subject.peak if least else None),
            )
        )
        turns = 5 if report.quick else TURNS
        ours, peers = in_child(replace(task, turns=turns))
        report.add(compared(f"{title}: time", ours, peers, unit="s", goal=goal(subject.time)))


def goal(bound: float | None) -> Goal | None:
    return None if bound is None else bound >= RATIO


def grants(fragment: Fragment, count: int) -> list[int]:
    """From the least to all, each larger by the same factor."""
    least, most = fragment.least_bytes, fragment.resident_bytes
    if least == most:
        return [most]
    return [round(least * (most / least) ** (step / (count - 1))) for step in range(count)]


def peak(task: Task) -> int:
    ((value,),) = in_child(task)
    return int(value)


def in_child(task: Task) -> list[list[float]]:
    command = [sys.executable, __file__, "--task", json.dumps(asdict(task))]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: list[list[float]] = json.loads(made.stdout)
    return result


# ---- in a child process --------------------------------------------------------------------------


def measure(task: Task) -> list[list[float]]:
    """The peak above the floor, or the times of both."""
    tune_allocator()
    meter = MemoryMeter()
    limit = max(task.granted_bytes, 64 * MIB)
    runtime = Runtime(meter, threads=task.threads, limit_bytes=limit)
    drop_library_pages()
    runtime.rehearse()
    feeds = SUBJECTS[task.name].inputs()
    if task.way == "granted":
        cache = FragmentCache(Path(task.cache), 1 << 40)
        preparation = Preparation(cache, lambda _: True, lambda _: None)
        fragment = cache.folder / task.digest.removeprefix("sha256:")
        prepared = asyncio.run(preparation.prepare(task.digest, fragment, task.granted_bytes))
        meter.settle()
        runtime.open(task.digest, fragment, task.granted_bytes, prepared)
        run: Callable[[], object] = lambda: runtime.run(task.digest, feeds, Stopper())  # noqa: E731
    else:
        meter.settle()
        run = whole(task, feeds)
    if not task.turns:
        used = 0
        for _ in range(RUNS):
            run()
            used = max(used, meter.peak_bytes())
        return [[used]]
    default = whole(replace(task, way="default"), feeds)
    for _ in range(2):
        run()
        default()
    samples = alternate({"ours": timed(run), "default": timed(default)}, turns=task.turns)
    return [samples["ours"], samples["default"]]


def whole(task: Task, feeds: Tensors) -> Callable[[], object]:
    """The whole model in ONNX Runtime, as it comes or mapped and without copies."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = task.threads
    if task.way == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = onnxruntime.InferenceSession(task.model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


if __name__ == "__main__":
    main()
