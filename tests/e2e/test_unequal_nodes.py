"""Nodes of unequal processors: plans know them by measurement, and nobody has said anything."""

import pytest

from e2e_cluster import SHAPES, Json, ShoalOnNodes, shoal_on_nodes

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
SLOW, CPUS = "pi-zero", 0.15
FRAGMENTS = 8


def test_the_placement_gives_a_slow_node_less(tmp_path_factory: pytest.TempPathFactory) -> None:
    with shoal_on_nodes(tmp_path_factory.mktemp("unequal")) as shoal:
        shoal.slow_node(SLOW, CPUS)
        for name in ("model", "pool"):
            shoal.kubectl("apply", f"--filename={shoal.examples / 'ocr' / name}.yaml")
        shoal.apply(kind("Partition", {"modelRef": {"name": "ppocr-rec"}, "fragments": FRAGMENTS}))
        shoal.wait("devicepool/shelf")
        shoal.wait("partition/unequal")
        refer = {"partitionRef": {"name": "unequal"}, "poolRef": {"name": "shelf"}}
        shoal.apply(kind("Placement", refer))
        shoal.wait("placement/unequal")
        speeds = {shape.name: speed_of(shoal, shape.name) for shape in SHAPES}
        work = work_by_node(shoal)
        print("speeds", speeds, "work", work)
        others = [name for name in speeds if name != SLOW]
        assert speeds[SLOW]["processors"] < min(speeds[each]["processors"] for each in others)
        assert work[SLOW] < min(work[each] for each in others)


def kind(name: str, spec: Json) -> Json:
    metadata = {"name": "unequal"}
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": name, "metadata": metadata, "spec": spec}


def speed_of(shoal: ShoalOnNodes, node: str) -> Json:
    speed: Json = shoal.get("device", f"shelf-{node}")["status"]["speed"]
    return speed


def work_by_node(shoal: ShoalOnNodes) -> dict[str, float]:
    """Operations of one item, by the node that computes them; replicas share theirs."""
    flops = [each["flops"] for each in shoal.get("partition", "unequal")["status"]["fragments"]]
    work = {shape.name: 0.0 for shape in SHAPES}
    for stage in shoal.get("placement", "unequal")["status"]["stages"]:
        for name in stage["devices"]:
            share = sum(flops[index] for index in stage["fragments"]) / len(stage["devices"])
            work[name] += share
    return work
