"""The queue of docs/kueue.md admits the Job of docs/kueue.md, by Kueue's own rules."""

import re
from pathlib import Path

import yaml

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kueue.md"


def test_the_queue_covers_all_that_the_gate_requests() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    objects = [each for block in blocks for each in yaml.safe_load_all(block)]
    found = {each["kind"]: each for each in objects}
    (group,) = found["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == found["ResourceFlavor"]["metadata"]["name"]
    assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
    assert found["LocalQueue"]["spec"]["clusterQueue"] == found["ClusterQueue"]["metadata"]["name"]
    gate = found["Job"]
    queue = gate["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert queue == found["LocalQueue"]["metadata"]["name"]
    pod = gate["spec"]["template"]["spec"]
    containers = pod["initContainers"] + pod["containers"]
    requested = {name for each in containers for name in each["resources"]["requests"]}
    assert requested | {"pods"} == set(group["coveredResources"])
