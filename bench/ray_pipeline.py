"""The peer: the same fragments as a pipeline of Ray actors, and as a Ray compiled graph.

Each actor holds one fragment in ONNX Runtime with one thread; tensors pass between actors in Ray's
own way. Runs in a process of its own (Ray keeps global state): reads a line of JSON, the request,

    {"fragments": [{"model": PATH, "inputs": [...], "outputs": [...]}],
     "results": [...], "item": NPZ, "items": 200, "warm": 20}

and answers it with the process numbers of its actors when their compiled graph is warm, and each
further line, a number, with what so many calls of the graph took, one after the other. When there
are no more lines, it gives the other figures. Answers are lines of JSON on standard output.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Their telemetry would look for hosts that are not to be reached from a test bed.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import ray
from ray.dag import InputNode
from resident import watched


@ray.remote(num_cpus=0)
class FragmentActor:
    """One stage: a dictionary of tensors in, the same dictionary and the stage's outputs out."""

    def __init__(self, model: str, inputs: list[str], outputs: list[str], keep: list[str]) -> None:
        import onnxruntime as ort  # noqa: PLC0415 - in the actor's process only

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs, self.keep = inputs, outputs, keep

    def step(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = self.session.run(self.outputs, {name: tensors[name] for name in self.inputs})
        both = {**tensors, **dict(zip(self.outputs, made, strict=True))}
        return {name: both[name] for name in self.keep}

    def process_id(self) -> int:
        return os.getpid()


def latencies(submit: Any, count: int) -> list[float]:
    """Seconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        ray.get(submit())
        taken.append(time.perf_counter() - started)
    return taken


def items_per_second(submit: Any, items: int, in_flight: int = 10) -> float:
    """Throughput with `in_flight` items on their way."""
    started = time.perf_counter()
    waiting: list[Any] = []
    for _ in range(items):
        if len(waiting) == in_flight:
            ray.get(waiting.pop(0))
        waiting.append(submit())
    for reference in waiting:
        ray.get(reference)
    return items / (time.perf_counter() - started)


def say(answer: Any) -> None:
    """A line for whoever has asked."""
    print(json.dumps(answer), flush=True)


def needed_after(fragments: list[dict[str, Any]], position: int, results: list[str]) -> list[str]:
    """What the stages behind still read, and the results."""
    later = {name for fragment in fragments[position + 1 :] for name in fragment["inputs"]}
    return sorted(later | set(results))


def main() -> None:
    request = json.loads(sys.stdin.readline())
    fragments, items = request["fragments"], request["items"]
    with np.load(request["item"]) as stored:
        item = dict(stored)
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    known = set(item)
    fragment_actor: Any = FragmentActor  # Ray's decorator adds what its types do not show
    actors = []
    for position, fragment in enumerate(fragments):
        known |= set(fragment["outputs"])
        keep = [n for n in needed_after(fragments, position, request["results"]) if n in known]
        actors.append(
            fragment_actor.remote(fragment["model"], fragment["inputs"], fragment["outputs"], keep)
        )

    def chain() -> Any:
        reference: Any = item
        for actor in actors:
            reference = actor.step.remote(reference)
        return reference

    latencies(chain, request["warm"])
    processes = ray.get([actor.process_id.remote() for actor in actors])
    with watched(processes) as peaks:
        compiled = compiled_items_per_second(actors, processes, item, items, request["warm"])
        latencies(chain, request["warm"])
        alone = latencies(chain, min(items // 5, 100))
        called = items_per_second(chain, items)
    ray.shutdown()
    say(
        {
            "actors": {"latencies_seconds": alone, "items_per_second": called},
            "compiled": {"items_per_second": compiled},
            "worker_peak_bytes": peaks,
        }
    )


def compiled_items_per_second(
    actors: Any, processes: Sequence[int], item: Any, items: int, warm: int
) -> float:
    """Of the actors as a compiled graph, which first answers what is asked about calls of it."""
    with InputNode() as source:
        node = source
        for actor in actors:
            node = actor.step.bind(node)
    compiled = node.experimental_compile()

    def submit() -> Any:
        return compiled.execute(item)

    latencies(submit, warm)
    say(processes)
    for line in sys.stdin:
        say(latencies(submit, int(line)))
    throughput = items_per_second(submit, items)
    compiled.teardown()
    return throughput


if __name__ == "__main__":
    main()
