"""The same three-stage pipelines on Shoal, on Ray actors and as a Ray compiled graph.

A tiny model shows what the machinery itself costs, MiniLM shows it with work to do. Ray is given
the fragments that Shoal cut, in default sessions with one thread.

Throughput: Shoal reads its items from files and writes every result durably to disk; Ray keeps both
in memory. Shoal is measured twice: with a file for each item, and with fifty items in a file.

Latency is what a program waits that has one input and needs its results, on a pool that is warm:
for Shoal `await model.run(inputs)` of the Python package, for Ray `get(graph.execute(inputs))`.
Both begin with arrays of the program and end with arrays of its own. Both are up at once and take
turns of `CALLS_A_TURN`, and a ratio is that of two turns which follow one another: a call takes a
quarter more when others use the machine, or when its processes get other processors. The first
calls of a turn are not counted, and Ray's actors, which keep processors busy while they wait, are
stopped where it is not their turn. All else is measured one after the other, with nothing of the
other system there. A line of its own says what an item of a job takes that has a file for each:
from the decision to run it to its results in the log, synced to the disk.

A line of its own says what bare gRPC streams of Python's asyncio interface would carry, if they did
nothing else: an item of three stages on three devices takes three tasks and their answers, two
activations and their acknowledgements, which is `MESSAGES` messages when none of them is sent
together with another.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from hop import bare_messages_per_second
from measurement import RATIO, Measurement, Report, compared, run_in_folder
from onnx import helper, numpy_helper
from pool import Pool, cut, running_pool, write_items
from ray_process import RayProcess
from resident import watched
from zoo.materialise import materialise

from shoal.asynchronous import AsyncModel
from shoal.items import Items
from shoal_protocol.partition import PartitionDocument, document_to_json
from shoal_protocol.v1 import coordinator_pb2 as pb

STAGES = 3
MESSAGES = 2 * STAGES + 2 * (STAGES - 1)
STACKED = 50
WARM = 20
CALLS_A_TURN = 20
FIRST_CALLS = 3
"""Of a turn: the other system has used the caches."""
DEVICES = ("one", "two", "three")
GOALS = {"tiny": (RATIO >= 2, RATIO <= 1), "MiniLM": (RATIO >= 1.2, RATIO <= 0.9)}
"""For the throughput, and the latency of one item, against a compiled graph on the same host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, and one item for it."""

    name: str
    path: Path
    item: Mapping[str, np.ndarray]


def tiny_model(folder: Path) -> Path:
    """Three small dense layers: next to no work."""
    random = np.random.default_rng(0)
    nodes, weights = [], []
    for layer in range(STAGES):
        weights.append(
            numpy_helper.from_array(
                random.standard_normal((64, 64)).astype(np.float32), f"w{layer}"
            )
        )
        nodes.append(helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"y{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"y{layer}"], [f"x{layer + 1}"]))
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info(f"x{STAGES}", onnx.TensorProto.FLOAT, [1, 64])],
        weights,
    )
    path = folder / "tiny.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, path)
    return path


def subjects(folder: Path) -> list[Subject]:
    random = np.random.default_rng(1)
    minilm = materialise("minilm_l6", Path(tempfile.gettempdir()) / "shoal-zoo")
    text = {
        "input_ids": random.integers(1000, 20_000, (1, 64)),
        "attention_mask": np.ones((1, 64), np.int64),
    }
    small = {"x0": random.standard_normal((1, 64)).astype(np.float32)}
    return [
        Subject(name="tiny", path=tiny_model(folder), item=small),
        Subject(name="MiniLM", path=minilm, item=text),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one system gives; latencies of one item at a time, in seconds: of a call, the median of
    each turn, and of a job with a file for each."""

    latencies: Sequence[float] = ()
    filed_seconds: float = 0.0
    items_per_second: float
    worker_bytes: Sequence[int]
    stacked_per_second: float = 0.0


@contextlib.asynccontextmanager
async def called(pool: Pool, document: PartitionDocument) -> AsyncIterator[AsyncModel]:
    """A model as a program has it that calls it, with each stage on a device of its own."""
    start = pb.SubmitJobRequest(
        name="calls",
        partition=document_to_json(document).encode(),
        stages=[pb.StagePlacement(devices=[device]) for device in DEVICES],
        mode=pb.STREAMING,
        backoff_limit=3,
    )
    items = Items(pool.open_channel(), pool.target, start)
    try:
        yield AsyncModel(items)
    finally:
        await items.close()


async def calls_in_turns(
    model: AsyncModel, item: Mapping[str, np.ndarray], ray: RayProcess, turns: int
) -> tuple[list[float], list[float]]:
    """What a call takes on Shoal and of Ray's compiled graph: the median of each turn."""

    async def ours(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            started = perf_counter()
            await model.run(item)
            taken.append(perf_counter() - started)
        return taken

    await ours(WARM)
    mine, theirs = list[float](), list[float]()
    for _ in range(turns):
        count = FIRST_CALLS + CALLS_A_TURN
        mine.append(median((await ours(count))[FIRST_CALLS:]))
        taken = await asyncio.to_thread(ray.latencies, count)
        theirs.append(median(taken[FIRST_CALLS:]))
    return mine, theirs


async def ours(
    pool: Pool, subject: Subject, document: PartitionDocument, items: int, turn: int
) -> Figures:
    """Shoal: one item at a time, then as many as it likes; without calls."""
    processes = [pool.process_id(name) for name in DEVICES]
    folder = pool.workspace.root / f"{subject.name}-{turn}"
    one_by_one = write_items(folder / "few", [subject.item] * min(items // 5, 100))
    many = write_items(folder / "many", [subject.item] * items)
    homes = [[DEVICES[stage]] for stage in range(STAGES)]
    label = f"{subject.name.lower()}-{turn}"
    warm = write_items(folder / "warm", [subject.item] * 10)
    await pool.run(f"{label}-warm", document, warm, folder / "warm-out", homes=homes)
    stack = {name: np.stack([value] * STACKED) for name, value in subject.item.items()}
    stacks = write_items(folder / "stacks", [stack] * (items // STACKED))
    with watched(processes) as peaks:
        latency = await pool.run(
            f"{label}-alone", document, one_by_one, folder / "few-out", homes=homes, parallelism=1
        )
        flood = await pool.run(f"{label}-many", document, many, folder / "many-out", homes=homes)
        stacked = await pool.run(
            f"{label}-stacked", document, stacks, folder / "stacked-out", homes=homes
        )
    for status in (latency, flood, stacked):
        assert status.state == pb.JobStatus.COMPLETE, status
    return Figures(
        filed_seconds=latency.latency.p50_seconds,
        items_per_second=items / flood.seconds,
        stacked_per_second=stacked.items / stacked.seconds,
        worker_bytes=peaks,
    )


def ray_request(
    pool: Pool, subject: Subject, document: PartitionDocument, items: int
) -> dict[str, Any]:
    """What Ray is to run."""
    folder = pool.workspace.root / "ray"
    folder.mkdir(exist_ok=True)
    item = folder / f"{subject.name}.npz"
    np.savez(item, **dict[str, Any](subject.item))
    fragments = [
        {
            "model": str(
                pool.store / "fragments" / f.digest.removeprefix("sha256:") / "model.onnx"
            ),
            "inputs": [spec.name for spec in f.inputs],
            "outputs": [spec.name for spec in f.outputs],
        }
        for f in document.fragments
    ]
    return {
        "fragments": fragments,
        "results": [spec.name for spec in document.outputs],
        "item": str(item),
        "items": items,
        "warm": WARM,
    }


def rays(answer: Mapping[str, Any], calls: Sequence[float]) -> dict[str, Figures]:
    """Ray's figures: the actors', and those of the compiled graph, whose calls were in turns."""
    latencies = {"actors": answer["actors"]["latencies_seconds"], "compiled": calls}
    return {
        kind: Figures(
            latencies=taken,
            items_per_second=answer[kind]["items_per_second"],
            worker_bytes=answer["worker_peak_bytes"],
        )
        for kind, taken in latencies.items()
    }


async def both(
    place: Path, subject: Subject, items: int, turn: int, *, call_turns: int
) -> tuple[Figures, dict[str, Figures]]:
    """Shoal's figures, then the calls of both, then Ray's: two processors do not hold both at
    work."""
    devices = [{"name": name, "memory": "256Mi"} for name in DEVICES]
    with contextlib.ExitStack() as stack:
        async with running_pool(place, devices, cgroups=False) as pool:
            shapes = {name: value.shape for name, value in subject.item.items()}
            document = cut(subject.path, pool.store, STAGES, shapes)
            mine = await ours(pool, subject, document, items, turn)
            request = ray_request(pool, subject, document, items)
            ray = stack.enter_context(await asyncio.to_thread(RayProcess, request))
            processes = [pool.process_id(name) for name in DEVICES]
            async with called(pool, document) as model:
                with watched(processes) as peaks:
                    calls, their_calls = await calls_in_turns(model, subject.item, ray, call_turns)
        mine = replace(
            mine,
            latencies=calls,
            worker_bytes=[max(each) for each in zip(mine.worker_bytes, peaks, strict=True)],
        )
        return mine, rays(await asyncio.to_thread(ray.finish), their_calls)


async def measure(report: Report, folder: Path) -> None:
    """Both systems in turns, for each subject."""
    turns = 1 if report.quick else 3
    for subject in subjects(folder):
        items = (150 if report.quick else 600) // (3 if subject.name == "MiniLM" else 1)
        mine: list[Figures] = []
        theirs: list[dict[str, Figures]] = []
        for turn in range(turns):
            place = folder / f"{subject.name}-{turn}"
            call_turns = 3 if report.quick else 10
            ours_now, theirs_now = await both(place, subject, items, turn, call_turns=call_turns)
            mine.append(ours_now)
            theirs.append(theirs_now)
        compare(report, subject.name, mine, theirs)
        if subject.name == "MiniLM":
            continue  # its time is arithmetic, of which bare messages have none
        bare = [
            await bare_messages_per_second(1.0 if report.quick else 2.0) / MESSAGES
            for _ in range(turns)
        ]
        report.add(
            compared(
                f"{subject.name}: throughput, against bare gRPC of as many messages",
                [one.stacked_per_second for one in mine],
                bare,
                unit="items/s",
            )
        )


def compare(
    report: Report, name: str, mine: Sequence[Figures], theirs: Sequence[Mapping[str, Figures]]
) -> None:
    """The lines of one subject."""
    for kind, title, throughput, latency in (
        ("compiled", "Ray compiled graph", *GOALS[name]),
        ("actors", "Ray actors", RATIO >= 1, None),
    ):
        peers = [one[kind] for one in theirs]
        calls, their_calls = [one.latencies for one in mine], [one.latencies for one in peers]
        if kind == "actors":  # which had no turns between ours
            calls, their_calls = (
                [[median(each)] for each in calls],
                [[median(each)] for each in their_calls],
            )
        report.add(
            compared(
                f"{name}: throughput, against {title}",
                [one.items_per_second for one in mine],
                [one.items_per_second for one in peers],
                unit="items/s",
                goal=throughput,
            )
        )
        report.add(
            compared(
                f"{name}: throughput, {STACKED} items in a file, against {title}",
                [one.stacked_per_second for one in mine],
                [one.items_per_second for one in peers],
                unit="items/s",
                goal=throughput,
            )
        )
        report.add(
            compared(
                f"{name}: latency of one item, against {title}",
                [*chain.from_iterable(calls)],
                [*chain.from_iterable(their_calls)],
                unit="s",
                goal=latency,
            )
        )
    report.add(
        Measurement(
            name=f"{name}: latency of one item of a job with files",
            value=median(one.filed_seconds for one in mine),
            unit="s",
        )
    )
    report.add(
        compared(
            f"{name}: memory per worker, against Ray",
            [max(one.worker_bytes) / 2**20 for one in mine],
            [max(one["compiled"].worker_bytes) / 2**20 for one in theirs],
            unit="MiB",
            goal=RATIO <= 0.5,
        )
    )


if __name__ == "__main__":
    run_in_folder(__doc__, measure)
