"""What an API server takes though it is written less plainly, such as nulls, is taken here too."""

import json
from pathlib import Path

import pytest

from shoal_api.kinds import KINDS
from shoal_api.schema import API_VERSION, parse
from shoal_cluster import ControlPlane

pytestmark = [pytest.mark.real, pytest.mark.cluster]

CRDS = Path(__file__).resolve().parents[2] / "crds"
MODEL = {"modelRef": {"name": "m"}}
MANY = {f"a{number}": "" for number in range(300)}
UNPLAIN: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("DevicePool", {}, {"budget": {"memory": 1e8}, "cache": None, "nodeSelector": {"a": None}}),
    ("DevicePool", {}, {"budget": {"memory": None, "percent": 50.0}}),
    ("Partition", {"labels": None, "creationTimestamp": None}, {**MODEL, "fragments": 3.0}),
    ("Partition", {"labels": MANY}, {**MODEL, "fragments": None, "maxFragmentSize": 1.5e9}),
    ("Model", {"annotations": MANY}, {"source": {"uri": "pvc://models/a.onnx", "digest": None}}),
    (
        "InferenceJob",
        {},
        {
            **MODEL,
            "poolRef": {"name": "p"},
            "inputs": {"uri": "pvc://lines/in"},
            "outputs": {"uri": "pvc://lines/out"},
            "priority": 1000.0,
        },
    ),
]


def test_nulls_floats_and_many_labels_mean_the_same_here_as_on_a_cluster(
    control_plane: ControlPlane,
) -> None:
    control_plane.kubectl("apply", "--server-side", f"--filename={CRDS}")
    for kind, metadata, spec in UNPLAIN:
        crd = f"crd/{KINDS[kind].plural}.shoal.dev"
        control_plane.kubectl("wait", "--for=condition=Established", crd)
        head = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x", **metadata}}
        given = {**head, "spec": spec}
        options = ("--dry-run=server", "--filename=-", "--output=json")
        taken = control_plane.kubectl("create", *options, given=json.dumps(given))
        here, there = (parse(KINDS[kind].cls, one) for one in (given, json.loads(taken)))
        assert not isinstance(here, tuple), here
        assert here.spec == getattr(there, "spec", there)
