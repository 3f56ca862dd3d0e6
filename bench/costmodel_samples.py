"""How long each node of a model takes, in a process of its own: what `costmodel.py` learns from.

python bench/costmodel_samples.py NAME RUNS   # JSON: rates, and the fields of each `Sample`
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnxruntime

from shoal_agent.calibration.probes import measure
from shoal_compiler.graph import Graph
from shoal_compiler.profile import Source
from shoal_compiler.work import features, nominal

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from real_models import MODELS, find

REORDERED = "_nchwc"
"""What ONNX Runtime appends to the name of a tensor that has its blocked layout."""


Rates = tuple[float, ...]
"""Of convolutions, matrix products and memory."""
BUDGET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """A node: its time, its nominal work, and what the estimator sees of it."""

    operator: str
    seconds: float
    amounts: tuple[int, int, int]
    """FLOPs of convolutions, of matrix products, and bytes."""
    features: tuple[float, ...]


def samples_of(name: str, runs: int) -> tuple[Rates, list[Sample]]:
    """What a thread of this machine does, and the nodes of a model whose sizes are known, in the
    order of the graph."""
    command = [sys.executable, __file__, name, str(runs)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    rates, lines = json.loads(made.stdout.splitlines()[-1])
    return tuple(rates), [
        Sample(line["operator"], line["seconds"], tuple(line["amounts"]), tuple(line["features"]))
        for line in lines
    ]


def main() -> None:
    name, runs = sys.argv[1], int(sys.argv[2])
    model = MODELS[name]
    items = model.inputs(0)
    source = Source.open(find(name))
    shapes = {each: value.shape for each, value in items.items()}
    seconds = _seconds(source.path, source.whole, items, runs)
    samples = []
    for index, setting in enumerate(source.settings(shapes)):
        if (amount := nominal(setting)) is not None:
            operator, taken = setting.shaped.node.op_type, seconds.get(index, 0.0)
            amounts = (amount.convolution, amount.matrix, amount.memory)
            samples.append(Sample(operator, taken, amounts, features(setting)))
    print(json.dumps([_rates(), [asdict(each) for each in samples]]))


def _rates() -> list[float]:
    """What one thread does in a second, as an agent measures it when it joins."""
    with TemporaryDirectory() as folder:
        speed = measure(1, Path(folder), BUDGET_BYTES)
    rates = (
        speed.convolution_flops_per_second,
        speed.product_flops_per_second,
        speed.memory_bytes_per_second,
    )
    return [rate or 0.0 for rate in rates]


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


def _seconds(path: Path, graph: Graph, items: Mapping[str, Any], runs: int) -> dict[int, float]:
    """The shortest time of each kernel, given to the node of the graph that costs most of those
    that it computes; by the node's index."""
    with TemporaryDirectory() as folder:
        options = _options()
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        options.optimized_model_filepath = f"{folder}/optimised.onnx"
        for key, value in {
            "session.optimized_model_external_initializers_file_name": "weights",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }.items():
            options.add_session_config_entry(key, value)
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        for _ in range(runs):
            session.run(None, dict(items))
        events = json.loads(Path(session.end_profiling()).read_text())
        kernels = onnx.load(f"{folder}/optimised.onnx", load_external_data=False).graph.node
    shortest = _shortest(events, runs)
    owners = _owners(graph, kernels)
    found: dict[int, float] = defaultdict(float)
    for kernel, owner in zip(kernels, owners, strict=True):
        if owner is not None:
            found[owner] += shortest.get(kernel.name, 0.0)
    return found


def _shortest(events: Sequence[Mapping[str, Any]], runs: int) -> dict[str, float]:
    """Seconds of each kernel by the name of its node; one that runs often in a run counts as
    often."""
    taken: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            taken[event["name"].removesuffix("_kernel_time")].append(event["dur"] * 1e-6)
    return {name: min(times) * max(1, len(times) // runs) for name, times in taken.items()}


def _owners(graph: Graph, kernels: Sequence[onnx.NodeProto]) -> list[int | None]:
    """For each kernel the node that is charged with its time: of the nodes that were joined in it
    the one with the most inputs that are weights, the first of them. None: what the runtime put in
    between, such as a change of layout, is charged to the node that makes what it reads."""
    makers = {name: index for index, node in enumerate(graph.nodes) for name in node.output}
    named = [_named(kernel, makers) for kernel in kernels]
    kept = {index for index in named if index is not None}
    owners: list[int | None] = []
    for kernel, index in zip(kernels, named, strict=True):
        if index is None:
            owners.append(_maker(kernel, makers))
            continue
        joined = [index, *_joined(graph, index, makers, kept)]
        owners.append(min(joined, key=lambda each: (-_weights(graph, each), each)))
    return owners


def _named(kernel: onnx.NodeProto, makers: Mapping[str, int]) -> int | None:
    names = [*kernel.output, kernel.name.removesuffix(REORDERED)]
    return next((makers[each] for each in names if each and each in makers), None)


def _maker(kernel: onnx.NodeProto, makers: Mapping[str, int]) -> int | None:
    names = (each.removesuffix(REORDERED) for each in kernel.input)
    return next((makers[each] for each in names if each in makers), None)


def _joined(graph: Graph, index: int, makers: Mapping[str, int], kept: set[int]) -> Iterator[int]:
    """The nodes before one that have no kernel of their own."""
    for name in graph.reads[index]:
        before = makers.get(name)
        if before is not None and before not in kept:
            yield before
            yield from _joined(graph, before, makers, kept)


def _weights(graph: Graph, index: int) -> int:
    return sum(graph.weights[name].bytes for name in graph.reads[index] if name in graph.weights)


if __name__ == "__main__":
    main()
