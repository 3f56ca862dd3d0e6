"""Nodes of unequal processors: plans know them by measurement, and nobody has said anything."""

import pytest

from e2e_cluster import SHAPES, Json, ShoalOnNodes, shoal_on_nodes

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(900),
]
SLOW, CPUS = "jetson", 0.15
# The first one by name: devices that count as equal would be in that order.
FRAGMENTS = 8


def test_the_placement_gives_a_slow_node_less(tmp_path_factory: pytest.TempPathFactory) -> None:
    with shoal_on_nodes(tmp_path_factory.mktemp("unequal")) as shoal:
        shoal.favour_nodes()
        shoal.slow_node(SLOW, CPUS)
        for name in ("model", "pool"):
            shoal.kubectl("apply", f"--filename={shoal.examples / 'ocr' / name}.yaml")
        shoal.apply(kind("Partition", {"modelRef": {"name": "ppocr-rec"}, "fragments": FRAGMENTS}))
        shoal.wait("devicepool/shelf")
        shoal.wait("partition/unequal")
        refer = {"partitionRef": {"name": "unequal"}, "poolRef": {"name": "shelf"}}
        shoal.apply(kind("Placement", refer))
        shoal.wait("placement/unequal")
        processors = {shape.name: processors_of(shoal, shape.name) for shape in SHAPES}
        stages = shoal.get("placement", "unequal")["status"]["stages"]
        print("processors", processors, "stages", stages)
        others = [name for name in processors if name != SLOW]
        assert 2 * processors[SLOW] < min(processors[each] for each in others)
        shared = [each["devices"] for each in stages if SLOW in each["devices"]]
        assert all(devices[-1] == SLOW for devices in shared)  # the best ones are first
        work = work_by_node(shoal, processors, stages)
        assert work[SLOW] < min(work[each] for each in others)


def kind(name: str, spec: Json) -> Json:
    metadata = {"name": "unequal"}
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": name, "metadata": metadata, "spec": spec}


def processors_of(shoal: ShoalOnNodes, node: str) -> float:
    speed: dict[str, float] = shoal.get("device", f"shelf-{node}")["status"]["speed"]
    return speed["processors"]


def work_by_node(
    shoal: ShoalOnNodes, processors: dict[str, float], stages: list[Json]
) -> dict[str, float]:
    """Operations of one item, by the node that computes them; replicas share theirs by speed."""
    flops = [each["flops"] for each in shoal.get("partition", "unequal")["status"]["fragments"]]
    work = dict.fromkeys(processors, 0.0)
    for stage in stages:
        whole = sum(processors[name] for name in stage["devices"])
        for name in stage["devices"]:
            shared = sum(flops[index] for index in stage["fragments"])
            work[name] += shared * processors[name] / whole
    return work
