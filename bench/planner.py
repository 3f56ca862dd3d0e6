"""What the planner of layers finds, against published results and rules of thumb, and how fast.

    .venv/bin/python bench/planner.py [--quick] [--json FILE] [--pictures FOLDER]

- PipeDream's graphs on 2, 4 and 8 devices: the straight pipelines of its optimiser, with the same
  costs (training, one device per stage), with links that never limit and with links of 1 GB/s.
  `PUBLISHED` has its bottlenecks where they were published; elsewhere its recurrence, written again
  in the plainest way, gives them.
- Scission's machines: every pair and triple, both of its networks, images that come from where the
  Raspberry Pi is, against an even split, the best single machine and Asteroid's heuristic: the
  worst ratio must not be above one.
- Chains of many layers on unequal devices, for each objective: processor time, and the gap to a
  bound that no plan can beat. With `--pictures`, how both grow with layers and devices.
- Pools of a dozen and more unequal devices, and several models on one pool (`planned_pools`).
"""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Final

import planned_pools
from measurement import (
    RATIO,
    VALUE,
    Measurement,
    Report,
    argument_parser,
    existing_folder,
    shared,
)

from shoal_cli.drawing.chart import BLUE, BROWN, GREEN
from shoal_cli.drawing.panels import Line, Panel
from shoal_cli.drawing.svg import draw
from shoal_planner.layers.documents import PIPEDREAM_KIND, pipedream, read_profile
from shoal_planner.layers.graph import COORDINATOR, Device, Layer, LayerGraph, Link, Pool, Tensor
from shoal_planner.layers.planning import plan
from shoal_planner.layers.plans import LayerPlan
from shoal_protocol.choices import Objective

PROFILES: Final = Path(__file__).parent / "profiles"

PUBLISHED: Final = {
    ("vgg16", 2): 0.3709,
    ("vgg16", 4): 0.21645,
    ("resnet50", 2): 0.22193,
    ("resnet50", 4): 0.11150,
}
PIPEDREAM: Final = ("alexnet", "resnet50", "squeezenet1_0", "vgg16")
"""Those of its graphs whose cuts can all be tried, in its recurrence as well."""
FREE: Final = Link()
LINKS: Final = {FREE: "free links", Link(1e9): "links of 1 GB/s"}
PI: Final = "raspberry-pi-4"
MACHINES: Final = (PI, "vm-2core", "desktop-2500", "desktop-6700k-cpu", "desktop-6700k-gpu")
FAR: Final = Link(50e6 / 8, 0.020)
NETWORKS: Final = {"wireless": Link(1.6e6 / 8, 0.0667), "wired": Link(20e6 / 8, 0.020)}
"""The Raspberry Pi's link to the others; among those it is `FAR`."""
RULES: Final = ("even split", "single device", "row by memory")


def main() -> None:
    """Print a table."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--pictures", type=existing_folder, metavar="FOLDER", help="draw the cost of planning"
    )
    options = parser.parse_args()
    report = Report(shared(options))
    for measurement in (*published(), *machines()):
        report.add(measurement)
    for size in SIZES[: 2 if options.quick else None]:
        for objective in Objective:
            for measurement in chains(size, objective):
                report.add(measurement)
    for measurement in planned_pools.measurements(quick=options.quick):
        report.add(measurement)
    if options.pictures is not None:
        (options.pictures / "planner.svg").write_text(picture())
    report.finish()


def published() -> Iterator[Measurement]:
    """The bottlenecks of straight pipelines, in seconds of a batch forward and back."""
    for model, (link, links) in product(PIPEDREAM, LINKS.items()):
        text = (PROFILES / "pipedream" / f"{model}.txt").read_text()
        graph = pipedream(text, training=True)
        theirs = pipedream_bottlenecks(graph, link)
        for devices in (2, 4, 8):
            alike = tuple(Device(name=f"gpu-{i}", kind=PIPEDREAM_KIND) for i in range(devices))
            answer = plan(graph, Pool(alike, link=link), Objective.THROUGHPUT)
            assert isinstance(answer, LayerPlan)
            rejected = {each.name: each.times for each in answer.rejected}
            ours = rejected.get("without replicas") or answer.times
            known = PUBLISHED.get((model, devices)) if link == FREE else None
            peer = theirs[devices] if known is None else known
            yield Measurement(
                name=f"{model}, {links}: bottleneck on {devices}",
                value=ours.period,
                unit="s",
                peer=peer,
                ratio=ours.period / peer,
                goal=RATIO <= 1.0002,  # published with four or five digits
            )


def pipedream_bottlenecks(graph: LayerGraph, link: Link) -> dict[int, float]:
    """By number of devices, what PipeDream's recurrence finds: the best pipeline of some layers on
    one device more is the best of fewer layers, and one stage with the others."""
    seconds = [layer.seconds[PIPEDREAM_KIND] for layer in graph.layers]
    before = _sets_with_their_producers(graph)
    crossing = {
        each: sum(
            tensor.bytes
            for tensor in graph.tensors
            if tensor.producer in each and any(c not in each for c in tensor.consumers)
        )
        / link.bytes_per_second
        for each in before
    }
    best = {each: sum(seconds[layer] for layer in each) for each in before}
    parted = {
        whole: [
            (part, max(crossing[part], sum(seconds[layer] for layer in whole - part)))
            for part in before
            if part and part < whole
        ]
        for whole in before
    }
    found = {1: best[before[-1]]}
    for devices in range(2, 9):
        best = {
            whole: min([best[whole], *(max(best[part], rest) for part, rest in parts)])
            for whole, parts in parted.items()
        }
        found[devices] = best[before[-1]]
    return found


def _sets_with_their_producers(graph: LayerGraph) -> list[frozenset[int]]:
    """All sets of layers that have the producers of all their members, the smaller ones first."""
    needs = {
        index: {one for one, other in graph.edges if other == index}
        for index in range(len(graph.layers))
    }
    level, found = {frozenset[int]()}, list[frozenset[int]]()
    while level:
        found += level
        level = {
            each | {layer}
            for each in level
            for layer, wanted in needs.items()
            if layer not in each and wanted <= each
        }
    return found


def machines() -> Iterator[Measurement]:
    """For each model, network and objective, the worst case among all pairs and triples."""
    for file in sorted((PROFILES / "scission").glob("*.json")):
        graph = with_images(read_profile(file.read_text()))
        for network, link in NETWORKS.items():
            for objective in (Objective.LATENCY, Objective.THROUGHPUT):
                ratios: list[float] = []
                for chosen in [*combinations(MACHINES, 2), *combinations(MACHINES, 3)]:
                    answer = plan(graph, pool_of(chosen, link), objective)
                    assert isinstance(answer, LayerPlan)
                    ratios.append(against_rules(answer))
                yield Measurement(
                    name=f"{file.stem}, {network}, {objective}: mean against the best rule",
                    value=sum(ratios) / len(ratios),
                    unit="",
                    peer=1.0,
                    ratio=max(ratios),
                    goal=RATIO <= 1.0,
                )


def with_images(graph: LayerGraph) -> LayerGraph:
    """With an image of single precision at the input."""
    image = Tensor(producer=None, consumers=(0,), bytes=224 * 224 * 3 * 4)
    return LayerGraph(graph.layers, (image, *graph.tensors))


def against_rules(answer: LayerPlan) -> float:
    """Its value by that of the best rule of thumb; a rule that is not rejected chose the same."""
    lost = {each.name.split(" (")[0]: each.value for each in answer.rejected}
    return max(answer.value / lost.get(rule, answer.value) for rule in RULES)


def pool_of(chosen: tuple[str, ...], link: Link) -> Pool:
    """Machines of Scission, with the network of the Raspberry Pi and of the images."""
    devices = tuple(Device(name=each, kind=each) for each in chosen)
    links = {
        frozenset((end, each)): link for end in (PI, COORDINATOR) for each in chosen if each != PI
    }
    return Pool(devices, links, FAR)


@dataclass(frozen=True)
class Size:
    """A question, within how many seconds it is to be answered, and with which gaps."""

    layers: int
    devices: int
    seconds: float
    gaps: Mapping[Objective, float]


def _gaps(throughput: float, latency: float, makespan: float) -> Mapping[Objective, float]:
    return dict(zip(Objective, (throughput, latency, makespan), strict=True))


SIZES: Final = (
    Size(213, 6, 1.0, _gaps(0.0, 0.0, 0.0)),
    Size(430, 16, 10.0, _gaps(0.1, 0.25, 0.1)),
    Size(1250, 50, 30.0, _gaps(0.15, 0.25, 0.35)),
)
ITEMS: Final = 100


def chains(size: Size, objective: Objective) -> Iterator[Measurement]:
    took, gap = planned(size.layers, size.devices, objective)
    name = f"{size.layers} layers on {size.devices} unequal devices, {objective}"
    yield Measurement(
        name=f"{name}, processor time", value=took, unit="s", goal=size.seconds >= VALUE
    )
    yield Measurement(name=f"{name}, gap", value=gap, unit="", goal=size.gaps[objective] >= VALUE)


def planned(layers: int, devices: int, objective: Objective) -> tuple[float, float]:
    """Processor time in seconds, and the gap that was stated."""
    graph, pool = random_chain(layers), random_pool(devices)
    started = time.process_time()
    answer = plan(graph, pool, objective, ITEMS)
    took = time.process_time() - started
    assert isinstance(answer, LayerPlan)
    return took, answer.gap


def picture() -> str:
    """How processor time grows with layers and with devices, and the gap with devices."""
    layers, devices = (50, 100, 213, 430, 800, 1250), (2, 4, 6, 8, 12, 16, 32, 50)
    colours = dict(zip(Objective, (BLUE, GREEN, BROWN), strict=True))
    by_layers = [
        Line(
            name=f"{count} devices",
            colour=colour,
            points=[(each, planned(each, count, Objective.THROUGHPUT)[0]) for each in layers],
        )
        for count, colour in ((6, GREEN), (16, BLUE), (50, BROWN))
    ]
    by_devices = {
        objective: [(count, planned(430, count, objective)) for count in devices]
        for objective in Objective
    }

    def lines(place: int, scale: float) -> list[Line]:
        return [
            Line(
                name=objective,
                colour=colours[objective],
                points=[(count, scale * found[place]) for count, found in points],
            )
            for objective, points in by_devices.items()
        ]

    panels = [
        Panel(
            title="Throughput: time by layers",
            x_title="layers",
            y_title="seconds",
            lines=by_layers,
        ),
        Panel(
            title="430 layers: time by devices",
            x_title="devices",
            y_title="seconds",
            lines=lines(0, 1.0),
        ),
        Panel(
            title="430 layers: by how much a plan could be better at most",
            x_title="devices",
            y_title="gap, %",
            lines=lines(1, 100.0),
        ),
    ]
    return draw(
        "The cost of planning layers",
        "Chains of layers that differ a hundredfold, on unequal devices and links; one processor",
        [panel.chart(f"{number}") for number, panel in enumerate(panels)],
    )


def random_chain(count: int) -> LayerGraph:
    """Layers that differ a hundredfold."""
    chance = random.Random(count)  # noqa: S311 - a fixed seed
    layers = tuple(
        Layer(
            name=f"l{index}",
            flops=chance.uniform(1e6, 1e8),
            weight_bytes=chance.uniform(0, 1e6),
            activation_bytes=1e5,
        )
        for index in range(count)
    )
    tensors = tuple(
        Tensor(producer=one, consumers=(one + 1,), bytes=chance.uniform(1e3, 1e6))
        for one in range(count - 1)
    )
    return LayerGraph(layers, tensors)


def random_pool(count: int) -> Pool:
    """Devices that differ tenfold in speed, thrice in memory, and links a hundredfold."""
    chance = random.Random(count)  # noqa: S311 - a fixed seed
    devices = tuple(
        Device(
            name=f"d{index}",
            budget_bytes=chance.uniform(15e6, 45e6),
            flops_per_second=chance.uniform(1e9, 1e10),
        )
        for index in range(count)
    )
    links = {
        frozenset((one.name, other.name)): Link(chance.uniform(1e6, 1e8), chance.uniform(0, 0.01))
        for one, other in combinations(devices, 2)
    }
    return Pool(devices, links)


if __name__ == "__main__":
    main()
