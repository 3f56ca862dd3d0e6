"""What would be refused later is refused when it is applied.

What a pool says of its agents' pods a real API server judges twice: the pool, and a DaemonSet with
the same fields.
"""

import json
from pathlib import Path

import pytest

from shoal_api.kinds import DevicePool, InferenceJob
from shoal_api.schema import API_VERSION, parse
from shoal_cluster import CommandFailed, ControlPlane

pytestmark = [pytest.mark.real, pytest.mark.cluster]

CRDS = Path(__file__).resolve().parents[2] / "crds"
LONG = "a" * 63
SUBDOMAIN = ".".join(["b" * 62] * 4)
TOLERATIONS: list[tuple[dict[str, object], str | None]] = [
    ({"operator": "Exists"}, None),
    ({"operator": "Exists", "value": ""}, None),
    ({"key": "edge"}, None),
    ({"key": f"{SUBDOMAIN}/{LONG}", "operator": "Equal", "value": LONG}, None),
    ({"key": "a", "effect": "NoExecute", "tolerationSeconds": 0}, None),
    ({"operator": "Exists", "effect": "NoSchedule"}, None),
    ({"key": "a", "operator": "Exists", "value": "b"}, "value must be left out with operator"),
    ({}, "operator must be Exists where there is no key"),
    ({"value": "b"}, "operator must be Exists where there is no key"),
    ({"key": "a", "tolerationSeconds": 5}, "effect must be NoExecute where tolerationSeconds"),
    (
        {"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5},
        "effect must be NoExecute where tolerationSeconds",
    ),
    ({"key": "a..b/c"}, "must be a label's or taint's name"),
    ({"key": f"{LONG}a"}, "must be a label's or taint's name"),
    ({"key": "/c"}, "must be a label's or taint's name"),
]
SELECTORS: list[tuple[dict[str, str], str | None]] = [
    ({"shoal.dev/pool": "shelf", "disk": "", "Arch_2": "arm64"}, None),
    ({f"{SUBDOMAIN}/{LONG}": LONG}, None),
    ({f"k{number}": "v" for number in range(32)}, None),
    ({"my pool": "shelf"}, "each name must be a label's or taint's name"),
    ({"": "shelf"}, "each name must be a label's or taint's name"),
    ({"a..b/c": "d"}, "each name must be a label's or taint's name"),
    ({"-a": "d"}, "each name must be a label's or taint's name"),
    ({f"{LONG}a": "d"}, "each name must be a label's or taint's name"),
    ({"good": "d", "a/b/c": "d"}, "each name must be a label's or taint's name"),
]
POD_FIELDS = [
    *(({"tolerations": [each]}, why) for each, why in TOLERATIONS),
    *(({"nodeSelector": each}, why) for each, why in SELECTORS),
]


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    control_plane.kubectl("apply", "--server-side", f"--filename={CRDS}")
    for plural in ("devicepools", "inferencejobs"):
        control_plane.kubectl("wait", "--for=condition=Established", f"crd/{plural}.shoal.dev")
    return control_plane


def refusal(plane: ControlPlane, document: object) -> str | None:
    """Why the API server does not take it; None: it does."""
    try:
        plane.kubectl("create", "--dry-run=server", "--filename=-", given=json.dumps(document))
    except CommandFailed as failed:
        return failed.said
    return None


def pool(**fields: object) -> dict[str, object]:
    head = {"apiVersion": API_VERSION, "kind": "DevicePool", "metadata": {"name": "shelf"}}
    return {**head, "spec": {"budget": {"memory": "64Mi"}, **fields}}


def daemon_set(**fields: object) -> dict[str, object]:
    labels = {"app": "agent"}
    pod = {"containers": [{"name": "agent", "image": "agent"}], **fields}
    template = {"metadata": {"labels": labels}, "spec": pod}
    head = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "agent"}}
    return {**head, "spec": {"selector": {"matchLabels": labels}, "template": template}}


@pytest.mark.parametrize(("fields", "why"), POD_FIELDS, ids=[str(each) for each in POD_FIELDS])
def test_a_pool_is_refused_for_what_its_pods_would_be(
    plane: ControlPlane, fields: dict[str, object], why: str | None
) -> None:
    said, of_pods = refusal(plane, pool(**fields)), refusal(plane, daemon_set(**fields))
    assert (said is None) == (of_pods is None), of_pods
    assert why is None or why in (said or "")
    read = parse(DevicePool, pool(**fields))
    assert isinstance(read, tuple) == (why is not None), read


def test_a_job_that_follows_its_inputs_is_refused_with_barriers(plane: ControlPlane) -> None:
    head = {"apiVersion": API_VERSION, "kind": "InferenceJob", "metadata": {"name": "live"}}
    spec = {
        "modelRef": {"name": "m"},
        "poolRef": {"name": "p"},
        "outputs": {"uri": "pvc://lines/out"},
    }
    for follow, mode in ((True, "Barrier"), (True, "Streaming"), (False, "Barrier"), (True, None)):
        inputs = {"uri": "pvc://lines/in", "follow": follow}
        given = {**head, "spec": {**spec, "inputs": inputs, "mode": mode}}
        said, wrong = refusal(plane, given), follow and mode == "Barrier"
        assert isinstance(parse(InferenceJob, given), tuple) == wrong
        assert (said is not None) == wrong, said
        assert not wrong or "spec.mode: Invalid value" in (said or "")
        assert not wrong or "a job that follows its inputs needs mode Streaming" in (said or "")
