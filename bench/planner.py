"""What the planner of layers finds, against published results and rules of thumb, and how fast.

    .venv/bin/python bench/planner.py [--quick] [--json FILE]

- PipeDream's graphs: the straight pipelines of its optimiser, with the same costs (training, links
  that never limit, one device per stage). `PUBLISHED` has its bottlenecks.
- Scission's machines: every pair and triple, both of its networks, images that come from where the
  Raspberry Pi is, against an even split, the best single machine and Asteroid's heuristic: the
  worst ratio must not be above one.
- Chains of many layers on unequal devices: processor time, and the gap to a bound that no plan can
  beat.
"""

import random
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Final

from measurement import RATIO, VALUE, Measurement, Report, parse_arguments

from shoal_planner.layers.documents import PIPEDREAM_KIND, pipedream, read_profile
from shoal_planner.layers.graph import COORDINATOR, Device, Layer, LayerGraph, Link, Pool, Tensor
from shoal_planner.layers.planning import plan, straight
from shoal_planner.layers.plans import LayerPlan
from shoal_protocol.choices import Objective

PROFILES: Final = Path(__file__).parent / "profiles"

PUBLISHED: Final = {
    ("vgg16", 2): 0.3709,
    ("vgg16", 4): 0.21645,
    ("resnet50", 2): 0.22193,
    ("resnet50", 4): 0.11150,
}
PI: Final = "raspberry-pi-4"
MACHINES: Final = (PI, "vm-2core", "desktop-2500", "desktop-6700k-cpu", "desktop-6700k-gpu")
FAR: Final = Link(50e6 / 8, 0.020)
NETWORKS: Final = {"wireless": Link(1.6e6 / 8, 0.0667), "wired": Link(20e6 / 8, 0.020)}
"""The Raspberry Pi's link to the others; among those it is `FAR`."""
RULES: Final = ("even split", "single device", "row by memory")


def main() -> None:
    """Print a table."""
    arguments = parse_arguments(__doc__)
    report = Report(arguments)
    for measurement in (*published(), *machines()):
        report.add(measurement)
    sizes = [(213, 6, 0.0), (430, 16, 0.1)] + [(1250, 50, 0.15)] * (not arguments.quick)
    for layers, devices, gap in sizes:
        for measurement in chains(layers, devices, gap):
            report.add(measurement)
    report.finish()


def published() -> Iterator[Measurement]:
    """The bottlenecks of straight pipelines, in seconds of a batch forward and back."""
    for (model, devices), theirs in PUBLISHED.items():
        text = (PROFILES / "pipedream" / f"{model}.txt").read_text()
        graph = pipedream(text, training=True)
        alike = tuple(Device(name=f"gpu-{i}", kind=PIPEDREAM_KIND) for i in range(devices))
        ours = straight(graph, Pool(alike), Objective.THROUGHPUT)
        assert ours is not None
        yield Measurement(
            name=f"{model}, bottleneck on {devices}",
            value=ours.period,
            unit="s",
            peer=theirs,
            ratio=ours.period / theirs,
            goal=RATIO <= 1.0002,  # published with four or five digits
        )


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


def chains(layers: int, devices: int, gap: float) -> Iterator[Measurement]:
    """Of throughput."""
    graph, pool = random_chain(layers), random_pool(devices)
    started = time.process_time()
    answer = plan(graph, pool, Objective.THROUGHPUT)
    took = time.process_time() - started
    assert isinstance(answer, LayerPlan)
    name = f"{layers} layers on {devices} unequal devices"
    yield Measurement(name=f"{name}, processor time", value=took, unit="s")
    yield Measurement(name=f"{name}, gap", value=answer.gap, unit="", goal=gap >= VALUE)


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
