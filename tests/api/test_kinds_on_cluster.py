"""What a real API server makes of the kinds: good objects are taken, of others it says why not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kind_reference import example_document
from shoal_api.columns import print_device_pool, print_job, print_model
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds import KINDS, KindNames
from shoal_api.kinds.device_pool import DeviceCounts, DevicePoolStatus
from shoal_api.kinds.inference_job import InferenceJobStatus, ItemCounts
from shoal_api.kinds.model import ModelStatus
from shoal_api.schema import API_VERSION, parse
from shoal_api.writing import write
from shoal_cluster import CommandFailed, ControlPlane

pytestmark = [pytest.mark.real, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "kinds"
kinds = pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)


class Cluster:
    """kubectl in the namespace of these tests."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def kubectl(self, *arguments: str, given: object = "") -> str:
        text = given if isinstance(given, str) else json.dumps(given)
        return self.plane.kubectl(f"--namespace={NAMESPACE}", *arguments, given=text)

    def create(self, document: object) -> Any:
        made = self.kubectl("create", "--filename=-", "--output=json", given=document)
        return json.loads(made)

    def refusal(self, *arguments: str, given: object = "") -> str:
        """What kubectl says when it does not do it."""
        with pytest.raises(CommandFailed) as failed:
            self.kubectl(*arguments, given=given)
        return failed.value.said


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane) -> Iterator[Cluster]:
    control_plane.kubectl("apply", "--server-side", f"--filename={ROOT / 'crds'}")
    crds = [f"crd/{names.plural}.shoal.dev" for names in KINDS.values()]
    control_plane.kubectl("wait", "--for=condition=Established", *crds)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    yield Cluster(control_plane)
    control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@kinds
def test_a_definition_is_accepted_whole(cluster: Cluster, names: KindNames) -> None:
    found = cluster.kubectl("get", "crd", f"{names.plural}.shoal.dev", "--output=json")
    conditions = {
        each["type"]: each["status"] for each in json.loads(found)["status"]["conditions"]
    }
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


@kinds
def test_the_example_of_the_reference_is_accepted(cluster: Cluster, names: KindNames) -> None:
    made = cluster.create(example_document(names))
    parsed = parse(names.cls, made)
    assert not isinstance(parsed, tuple), [str(error) for error in parsed]


@pytest.mark.parametrize("folder", ["ocr", "vision", "embeddings"])
def test_the_files_that_shoal_runs_are_accepted(cluster: Cluster, folder: str) -> None:
    given = f"--filename={ROOT / 'examples' / folder}"
    assert "serverside-applied" in cluster.kubectl("apply", "--server-side", given)
    cluster.kubectl("delete", given)


@kinds
def test_kinds_are_found_by_short_name_and_category(cluster: Cluster, names: KindNames) -> None:
    listed = cluster.kubectl("api-resources", "--api-group=shoal.dev", "--categories=shoal")
    rows = {row.split()[0]: row.split()[1:] for row in listed.splitlines()}
    assert rows[names.plural] == [names.short, API_VERSION, "true", names.cls.__name__]
    assert cluster.kubectl("get", names.short, "--output=name") == cluster.kubectl(
        "get", names.singular, "--output=name"
    )


def test_explain_says_meaning_bounds_default_and_example(cluster: Cluster) -> None:
    told = " ".join(cluster.kubectl("explain", "dpool.spec.cache.size").split())
    assert "At most so much. Unit: bytes." in told
    assert "Value: quantity of bytes, 1Mi to 1Pi. Default: 1Gi. Example: 4Gi" in told


@kinds
def test_explain_knows_every_field(cluster: Cluster, names: KindNames) -> None:
    told = cluster.kubectl("explain", "--recursive", f"{names.plural}.spec")
    assert "<none>" not in cluster.kubectl("explain", f"{names.plural}.spec")
    assert "FIELDS:" in told


def test_defaults_are_shown(cluster: Cluster) -> None:
    pool = cluster.create(pool_named("bare"))
    assert pool["spec"] == {
        "budget": {"memory": "64Mi"},
        "residency": "Adaptive",
        "cache": {"size": "1Gi"},
        "coordinator": {"storage": {"size": "5Gi"}},
    }
    job = cluster.create(job_named("bare"))
    assert {name: job["spec"][name] for name in ("mode", "policy", "objective")} == {
        "mode": "Streaming",
        "policy": "Mabac",
        "objective": "Throughput",
    }
    assert (job["spec"]["priority"], job["spec"]["backoffLimit"]) == (0, 3)
    assert job["spec"]["suspend"] is False


# ---- what kubectl get prints ---------------------------------------------------------------------


def condition(type_: str) -> Condition:
    return Condition(
        type=type_,
        status=ConditionStatus.TRUE,
        reason="Seen",
        last_transition_time="2026-01-31T12:00:00Z",
    )


def print_of(cluster: Cluster, kind: str, name: str, status: object) -> list[list[str]]:
    """The table that kubectl prints once an object has this status."""
    patch = json.dumps({"status": write(status)})
    cluster.kubectl("patch", kind, name, "--subresource=status", "--type=merge", f"--patch={patch}")
    return [line.split() for line in cluster.kubectl("get", kind, name).splitlines()]


def test_a_model_is_printed_with_its_size(cluster: Cluster) -> None:
    source = {"uri": "pvc://models/rec.onnx"}
    cluster.create(document("Model", "printed", {"source": source}))
    status = ModelStatus(conditions=(condition("Ready"),), size_bytes=10905190)
    header, row = print_of(cluster, "model", "printed", print_model(status, (3,)))
    assert header == ["NAME", "SIZE", "FRAGMENTS", "READY", "AGE"]
    assert row[:-1] == ["printed", "10.4", "MiB", "3", "True"]


def test_a_pool_is_printed_with_its_devices(cluster: Cluster) -> None:
    cluster.create(pool_named("printed"))
    status = DevicePoolStatus(
        conditions=(condition("Ready"),),
        devices=DeviceCounts(total=3, ready=3),
        budget_bytes=192 << 20,
    )
    header, row = print_of(cluster, "dpool", "printed", print_device_pool(status))
    assert header == ["NAME", "DEVICES", "BUDGET", "READY", "AGE"]
    assert row[:-1] == ["printed", "3/3", "192Mi", "True"]


def test_a_job_is_printed_with_how_far_it_is(cluster: Cluster) -> None:
    cluster.create(job_named("printed"))
    status = InferenceJobStatus(
        conditions=(condition("Planned"),),
        start_time="2026-01-31T12:00:00Z",
        items=ItemCounts(total=400, succeeded=120),
        items_per_second=38.2,
    )
    printed = print_job(status, "ppocr-rec", "shelf")
    header, row = print_of(cluster, "ij", "printed", printed)
    assert header == ["NAME", "MODEL", "POOL", "ITEMS", "RATE", "STATUS", "AGE"]
    assert row[:-1] == ["printed", "ppocr-rec", "shelf", "120/400", "38/s", "Running"]


def test_get_shoal_lists_objects_of_all_kinds(cluster: Cluster) -> None:
    listed = cluster.kubectl("get", "shoal", "--output=name").split()
    assert {"model.shoal.dev/printed", "devicepool.shoal.dev/bare"} <= set(listed)
    assert "inferencejob.shoal.dev/printed" in listed


def test_wait_returns_when_a_condition_holds(cluster: Cluster) -> None:
    name = "inferencejob/waited"
    cluster.create(job_named("waited"))
    cluster.refusal("wait", "--for=condition=Complete", name, "--timeout=1s")
    status = InferenceJobStatus(conditions=(condition("Complete"),))
    print_of(cluster, "ij", "waited", status)
    waited = cluster.kubectl("wait", "--for=condition=Complete", name, "--timeout=5s")
    assert "condition met" in waited


# ---- what is refused -----------------------------------------------------------------------------


def document(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": API_VERSION, "kind": kind}
    return {**head, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def pool_named(name: str, **spec: object) -> dict[str, Any]:
    return document("DevicePool", name, {"budget": {"memory": "64Mi"}, **spec})


def job_named(name: str, **spec: object) -> dict[str, Any]:
    base: dict[str, Any] = {
        "modelRef": {"name": "m"},
        "poolRef": {"name": "p"},
        "inputs": {"uri": "pvc://lines/in"},
        "outputs": {"uri": "pvc://lines/out"},
    }
    given = {key: value for key, value in (base | spec).items() if value is not None}
    return document("InferenceJob", name, given)


def model(**source: object) -> dict[str, Any]:
    return document("Model", "bad", {"source": {"uri": "pvc://models/a.onnx", **source}})


def partition(**spec: object) -> dict[str, Any]:
    return document("Partition", "bad", {"modelRef": {"name": "m"}, **spec})


def placement(*pins: dict[str, object]) -> dict[str, Any]:
    spec = {"partitionRef": {"name": "p"}, "poolRef": {"name": "q"}, "pins": list(pins)}
    return document("Placement", "bad", spec)


def local(**device: object) -> dict[str, Any]:
    devices = [{"name": "pi", "memory": "24Mi", **device}]
    return pool_named("bad", local={"devices": devices})


QUANTITY = "must be a quantity such as"
BAD = [
    (
        model(uri="gopher://x/y"),
        'spec.source.uri: Invalid value: "gopher://x/y": must be an address with pvc://, '
        "https://, s3:// or oci:// (local paths and file:// are for shoal run)",
    ),
    (model(digest="latest"), '"latest": must be a digest, sha256: and 64 hexadecimal digits'),
    (document("Model", "bad", {}), "spec.source: Required value"),
    (document("Model", "Bad_Name", {"source": {"uri": "a"}}), "metadata.name"),
    (
        document(
            "Model", "bad", {"source": {"uri": "a"}, "shapes": [{"input": "x", "shape": [0]}]}
        ),
        "spec.shapes[0].shape[0] in body should be greater than or equal to 1",
    ),
    (partition(fragments=3, cuts=["a"]), "at most one of fragments, maxFragmentSize, cuts"),
    (partition(fragments=0), "spec.fragments in body should be greater than or equal to 1"),
    (partition(fragments=257), "spec.fragments in body should be less than or equal to 256"),
    (partition(maxFragmentSize="1"), f'spec.maxFragmentSize: Invalid value: "1": {QUANTITY} 16Mi'),
    (partition(fragmets=3), 'unknown field "spec.fragmets"'),
    (pool_named("bad", budget={}), "exactly one of memory, percent must be given"),
    (
        pool_named("bad", budget={"memory": "1Gi", "percent": 5}),
        "exactly one of memory, percent must be given",
    ),
    (pool_named("bad", budget={"memory": "64m"}), f'"64m": {QUANTITY} 64Mi, 1Mi to 16Ti'),
    (pool_named("bad", budget={"memory": "64Mb"}), f'"64Mb": {QUANTITY} 64Mi, 1Mi to 16Ti'),
    (pool_named("bad", budget={"percent": 96}), "should be less than or equal to 95"),
    (
        pool_named("bad", residency="single"),
        'Unsupported value: "single": supported values: "Adaptive", "Single"',
    ),
    (pool_named("bad", nodeSelector={"a": "b c"}), '"b c": must be a label\'s value'),
    (pool_named("bad", tolerations=[{"key": "a b"}]), "\"a b\": must be a label's or taint's name"),
    (pool_named("bad", cache={"storageClassName": "A_B"}), '"A_B": must be a storage class'),
    (local(cpus="5000"), f'devices[0].cpus: Invalid value: "5000": {QUANTITY} 0.5, 10m to 1024'),
    (local(name="Pi 4"), 'devices[0].name: Invalid value: "Pi 4": must be a'),
    (
        pool_named("bad", local={"devices": [{"name": "pi", "memory": "24Mi"}] * 2}),
        'spec.local.devices[1]: Duplicate value: {"name":"pi"}',
    ),
    (
        placement({"fragment": 0, "device": "a"}, {"fragment": 0, "device": "b"}),
        'spec.pins[1]: Duplicate value: {"fragment":0}',
    ),
    (
        job_named("bad", modelRef=None),
        "exactly one of modelRef, partitionRef, placementRef must be",
    ),
    (job_named("bad", partitionRef={"name": "x"}), "exactly one of modelRef, partitionRef"),
    (job_named("bad", poolRef=None), "exactly one of poolRef, placementRef must be given"),
    (
        model(secretRef={"name": "s3..example"}),
        'Invalid value: "s3..example": must be the name of a Secret',
    ),
    (job_named("bad", modelRef="m"), "spec.modelRef in body must be of type object"),
    (job_named("bad", activeDeadlineSeconds=0), "should be greater than or equal to 1"),
    (
        job_named("bad", outputs={"uri": "oci://x/y"}),
        "must be an address with pvc://, https:// or s3:// (local paths and file:// are for",
    ),
    (document("Device", "bad", {}), "spec.poolRef: Required value"),
    (document("Device", "bad", {"poolRef": {"name": ""}}), "spec.poolRef.name"),
    (job_named("bad", mode="Eager"), 'Unsupported value: "Eager": supported values: "Streaming"'),
    (job_named("bad", inputs=None), "spec.inputs: Required value"),
    (job_named("bad", backoffLimit=-1), "should be greater than or equal to 0"),
    (job_named("bad", priority=5000), "spec.priority in body should be less than or equal to 1000"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_object_is_refused_with_its_field_and_why(
    cluster: Cluster, bad: dict[str, Any], message: str
) -> None:
    said = cluster.refusal("create", "--filename=-", given=bad)
    assert message in said
    kind = KINDS[bad["kind"]].cls
    assert isinstance(parse(kind, bad), tuple), "the parser takes it"


def test_a_secret_may_be_called_as_kubernetes_allows(cluster: Cluster) -> None:
    """After the host that it opens, for one."""
    good = model(secretRef={"name": f"s3.{'a' * 63}.example-1.com"})
    good["metadata"]["name"] = "with-a-secret"
    cluster.create(good)
    assert not isinstance(parse(KINDS["Model"].cls, good), tuple)


def test_what_a_job_is_cannot_be_edited_but_when_it_runs_can(cluster: Cluster) -> None:
    cluster.create(job_named("edited"))

    def patch(spec: dict[str, object]) -> tuple[str, ...]:
        text = json.dumps({"spec": spec})
        return ("patch", "ij", "edited", "--type=merge", f"--patch={text}")

    said = cluster.refusal(*patch({"inputs": {"uri": "pvc://other/in"}}))
    assert "spec.inputs: Invalid value" in said
    assert "inputs cannot be changed once it is set; make a new object" in said
    cluster.refusal(*patch({"modelRef": None, "partitionRef": {"name": "x"}}))
    cluster.kubectl(*patch({"suspend": True, "priority": 5, "parallelism": 2}))
    cluster.kubectl(*patch({"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0}))
    cluster.kubectl(*patch({"end": True}))
    assert "end cannot be taken back" in cluster.refusal(*patch({"end": False}))


def test_what_a_job_has_ended_as_cannot_be_edited(cluster: Cluster) -> None:
    cluster.create(job_named("ended"))
    failed = InferenceJobStatus(
        conditions=(condition("Failed"),),
        start_time="2026-01-31T12:00:00Z",
        items=ItemCounts(total=24, succeeded=23, failed=1),
        items_per_second=38.0,
    )
    print_of(cluster, "ij", "ended", failed)

    def patch(status: object) -> tuple[str, ...]:
        text = json.dumps({"status": status})
        return ("patch", "ij/ended", "--subresource=status", "--type=merge", f"--patch={text}")

    for edit in (
        {
            "conditions": write(InferenceJobStatus(conditions=(condition("Complete"),)))[
                "conditions"
            ]
        },
        {"conditions": None},
        {"items": {"succeeded": 24, "failed": 0}},
        {"startTime": None},
        {"itemsPerSecond": 39.0},
        {"itemsPerSecond": None},
        None,
    ):
        said = cluster.refusal(*patch(edit))
        assert "the job has ended: what its status says of that stays" in said
    cluster.kubectl(*patch({"observedGeneration": 2, "columns": {"items": "23/24"}}))
    cluster.kubectl(*patch(write(failed)))
    cluster.kubectl("patch", "ij/ended", "--type=merge", '--patch={"spec": {"suspend": true}}')


def test_a_digest_can_be_given_later_but_not_changed(cluster: Cluster) -> None:
    cluster.create(document("Model", "digested", {"source": {"uri": "pvc://models/a.onnx"}}))

    def patch(digest: str) -> tuple[str, ...]:
        text = json.dumps({"spec": {"source": {"digest": f"sha256:{digest * 64}"}}})
        return ("patch", "mdl", "digested", "--type=merge", f"--patch={text}")

    cluster.kubectl(*patch("a"))
    said = cluster.refusal(*patch("b"))
    assert "spec.source.digest: Invalid value" in said
    assert "digest cannot be changed once it is set; make a new object" in said


def test_a_volume_keeps_its_class_whatever_its_size(cluster: Cluster) -> None:
    cluster.create(pool_named("grown"))

    def patch(storage: dict[str, str]) -> tuple[str, ...]:
        text = json.dumps({"spec": {"coordinator": {"storage": storage}}})
        return ("patch", "dpool", "grown", "--type=merge", f"--patch={text}")

    cluster.kubectl(*patch({"size": "6Gi"}))
    cluster.kubectl(*patch({"size": "5G"}))
    assert "storageClassName cannot be changed" in cluster.refusal(
        *patch({"storageClassName": "fast"})
    )


def test_the_largest_object_that_the_schema_allows_is_within_the_cost_of_rules(
    cluster: Cluster,
) -> None:
    devices = [
        {"name": f"d{index}", "memory": "24Mi", "cpus": "0.5", "link": {"rate": "100M"}}
        for index in range(64)
    ]
    cluster.create(pool_named("large", local={"devices": devices}))
    pins = [{"fragment": index, "device": "d" * 63} for index in range(256)]
    large = placement(*pins)
    large["metadata"]["name"] = "large"
    assert len(cluster.create(large)["spec"]["pins"]) == 256


def test_conditions_of_two_writers_are_merged_by_type(cluster: Cluster) -> None:
    cluster.create(pool_named("merged"))
    for type_ in ("CoordinatorReady", "AgentsReady"):
        status = write(DevicePoolStatus(conditions=(condition(type_),)))
        cluster.kubectl(
            "apply",
            "--server-side",
            "--subresource=status",
            f"--field-manager={type_.lower()}",
            "--filename=-",
            given={**pool_named("merged"), "status": status},
        )
    found = json.loads(cluster.kubectl("get", "dpool", "merged", "--output=json"))
    types = {each["type"] for each in found["status"]["conditions"]}
    assert types == {"CoordinatorReady", "AgentsReady"}


def test_what_argo_cd_compares_stays_as_it_was_applied(cluster: Cluster) -> None:
    """The API server fills defaults in, but rewrites nothing that was given."""
    for path in sorted((ROOT / "examples" / "ocr").glob("*.yaml")):
        given = yaml.safe_load(path.read_text())
        cluster.kubectl("apply", "--server-side", f"--filename={path}")
        name = f"{KINDS[given['kind']].plural}/{given['metadata']['name']}"
        found = json.loads(cluster.kubectl("get", name, "--output=json"))
        assert contains(found["spec"], given["spec"]), name


def contains(found: object, given: object) -> bool:
    if isinstance(found, dict) and isinstance(given, dict):
        return all(key in found and contains(found[key], value) for key, value in given.items())
    return found == given
