"""The kinds' declarations: parser and OpenAPI schema agree, and errors tell all at once."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kind_reference import example_document
from kubernetes_schema import cel_holds, every_schema, problems
from shoal_api.kinds import KINDS, DevicePool, InferenceJob, KindNames, Partition
from shoal_api.schema import API_VERSION, openapi_schema, parse
from shoal_api.shapes import FieldError
from shoal_protocol.choices import Mode, Residency

BAD: tuple[Any, ...] = (
    *(
        None,
        True,
        5,
        -1,
        2.5,
        3.0,
        1e8,
        10**20,
        "",
        "x" * 600,
        "Foo Bar",
        "64Mb",
        "1e999",
        "5Gi\n",
        "True",
    ),
    *([], {}, [1, 1], [{"name": "a"}, {"name": "a"}], {"name": "x"}, {"nmae": "x"}, "gopher://x"),
)
GOOD_TEXT = ("a", "pi-4", "Ready", "sha256:" + "ab" * 32, "pvc://a/b", "2026-01-31T12:00:00Z")


@cache
def schema_of(names: KindNames) -> dict[str, Any]:
    """Made once, not for each example."""
    return openapi_schema(names.cls)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly what a schema allows, sometimes not."""
    good = _good(schema)
    return st.integers(0, 49).flatmap(lambda luck: st.sampled_from(BAD) if luck == 7 else good)


def _good(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from(["64Mi", "1G", "0.5", "250m", "100M", "1e7", 10**8, 1, "1Ki"])
    if "properties" in schema:
        return _objects(schema)
    least, most = schema.get("minimum", 0), schema.get("maximum", 2**63 - 1)
    plain: dict[str, st.SearchStrategy[Any]] = {
        "integer": st.sampled_from([least, most, least, most, least - 1, most + 1, 3, 3.0]),
        "number": st.sampled_from([0, 0.5, 17, -0.5]),
        "boolean": st.booleans(),
    }
    match schema["type"]:
        case "string":
            return st.sampled_from(_texts(schema))
        case "object":
            return st.dictionaries(st.sampled_from("abc"), values(schema["additionalProperties"]))
        case "array":
            return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
        case name:
            return plain[name]


def _texts(schema: dict[str, Any]) -> list[str]:
    if "enum" in schema:
        return list(schema["enum"])
    return [text for text in GOOD_TEXT if not problems(schema, text)] or ["a"]


@st.composite
def _objects(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    required = schema.get("required", [])
    document = {}
    for name, inner in schema["properties"].items():
        if draw(st.integers(0, 29)) if name in required else draw(st.integers(0, 3)) == 1:
            document[name] = draw(values(inner))
    for rule in schema.get("x-kubernetes-validations", []):
        if rule["rule"].endswith("== 1") and draw(st.integers(0, 5)):
            _keep_one(draw, re.findall(r"has\(self\.(\w+)\)", rule["rule"]), schema, document)
    if draw(st.integers(0, 39)) == 11:
        document["unknownField"] = 1
    return document


def _keep_one(
    draw: st.DrawFn, names: list[str], schema: dict[str, Any], document: dict[str, Any]
) -> None:
    """Left to chance, documents would hardly ever follow an exactly-one rule."""
    given = [name for name in names if name in document]
    if not given:
        document[names[0]] = draw(values(schema["properties"][names[0]]))
    for name in given[:-1]:
        del document[name]


@st.composite
def documents(draw: st.DrawFn, names: KindNames) -> dict[str, Any]:
    schema: Any = schema_of(names)["properties"]
    document: dict[str, Any] = {"apiVersion": API_VERSION, "kind": names.cls.__name__}
    name = draw(values(schema["metadata"]["properties"]["name"]))
    document["metadata"] = {"name": name if name is not None else ""}  # Kubernetes' own is stricter
    document["spec"] = draw(values(schema["spec"]))
    if draw(st.booleans()):
        document["status"] = draw(values(schema["status"]))
    return document


kinds = pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)


def errors_of(parsed: object) -> tuple[FieldError, ...]:
    return parsed if isinstance(parsed, tuple) else ()


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parser_and_schema_accept_and_refuse_the_same(
    names: KindNames, data: st.DataObject
) -> None:
    # What evaluates rules draws from `random` when it is imported, which no strategy may do.
    assert cel_holds("true", None)
    document = data.draw(documents(names))
    by_schema = problems(schema_of(names), document)
    by_parser = errors_of(parse(names.cls, document))
    event("refused" if by_parser else "accepted")
    assert bool(by_schema) == bool(by_parser), (by_schema, [str(error) for error in by_parser])


@kinds
def test_the_example_of_the_reference_is_accepted(names: KindNames) -> None:
    document = example_document(names)
    assert errors_of(parse(names.cls, document)) == ()
    assert problems(openapi_schema(names.cls), document) == []


@kinds
def test_the_schema_is_structural_and_described(names: KindNames) -> None:
    schema: Any = openapi_schema(names.cls)
    Draft202012Validator.check_schema(schema)
    for path, each in every_schema(schema):
        assert ("type" in each) != bool(each.get("x-kubernetes-int-or-string")), path
        assert not ("properties" in each and "additionalProperties" in each), path
        for key in each.get("x-kubernetes-list-map-keys", []):
            assert key in each["items"]["required"], path
        if path.startswith((".spec", ".status")):
            for name, inner in each.get("properties", {}).items():
                assert inner["description"], f"{path}.{name}"


@kinds
def test_defaults_and_examples_follow_their_own_schema(names: KindNames) -> None:
    for path, each in every_schema(openapi_schema(names.cls)):
        for word in each.keys() & {"default", "example"}:
            assert problems(each, each[word]) == [], f"{word} of {path}"


BOUNDS = {
    "string": ({"maxLength"}, {"enum"}),
    "array": ({"maxItems"},),
    "integer": ({"minimum", "format"},),
    "object": ({"maxProperties"}, {"properties"}),
}


@kinds
def test_everything_is_bounded(names: KindNames) -> None:
    for path, each in every_schema(openapi_schema(names.cls)):
        ways = BOUNDS.get(each.get("type", ""), (set(),))
        known = path in (".apiVersion", ".kind")
        assert known or any(way <= each.keys() for way in ways), path


@kinds
def test_rules_speak_of_fields_that_have_no_default(names: KindNames) -> None:
    """The API server fills defaults in before it asks the rules; the parser asks before."""
    for path, each in every_schema(openapi_schema(names.cls)):
        for rule in each.get("x-kubernetes-validations", []):
            if "oldSelf" in rule["rule"]:
                continue  # about change: defaults are in both, and the parser does not ask
            for name, inner in each.get("properties", {}).items():
                assert f"has(self.{name})" not in rule["rule"] or "default" not in inner, path


# ---- values --------------------------------------------------------------------------------------


def pool(**spec: object) -> dict[str, object]:
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": "DevicePool",
        "metadata": {"name": "shelf"},
    }
    return {**document, "spec": {"budget": {"memory": "64Mi"}, **spec}}


def job(**spec: object) -> dict[str, object]:
    base = {"inputs": {"uri": "in"}, "outputs": {"uri": "out"}}
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": "InferenceJob",
        "metadata": {"name": "ocr"},
    }
    return {**document, "spec": {**base, **spec}}


MODEL = {"modelRef": {"name": "m"}, "poolRef": {"name": "p"}}


def test_a_parsed_pool_has_bytes_thousandths_and_defaults() -> None:
    devices = [
        {"name": "pi", "memory": "24Mi", "cpus": "0.25", "link": {"rate": "100M"}},
        {"name": "big", "memory": 33554432, "cpus": 2},
    ]
    parsed = parse(DevicePool, pool(local={"devices": devices}, nodeSelector={"a/b": "c"}))
    assert isinstance(parsed, DevicePool)
    assert parsed.spec.local is not None
    pi, big = parsed.spec.local.devices
    assert (pi.memory, pi.cpus, big.memory, big.cpus) == (24 << 20, 250, 32 << 20, 2000)
    assert pi.link is not None
    assert (pi.link.rate, pi.link.latency_milliseconds) == (100_000_000, 0)
    assert parsed.spec.residency is Residency.ADAPTIVE
    assert parsed.spec.cache.size == 1 << 30
    assert parsed.spec.coordinator.storage.size == 5 << 30
    assert dict(parsed.spec.node_selector) == {"a/b": "c"}


def test_a_parsed_job_has_defaults_and_cannot_be_changed() -> None:
    parsed = parse(InferenceJob, job(**MODEL))
    assert isinstance(parsed, InferenceJob)
    assert parsed.spec.mode is Mode.STREAMING
    assert (parsed.spec.backoff_limit, parsed.spec.active_deadline_seconds) == (3, None)
    with pytest.raises(AttributeError):
        parsed.spec.priority = 3  # type: ignore[misc]


def test_what_the_api_server_adds_to_an_object_is_accepted() -> None:
    document = job(**MODEL)
    document["metadata"] = {
        "name": "ocr",
        "uid": "0c1f",
        "generation": 2,
        "resourceVersion": "17",
        "creationTimestamp": "2026-01-31T12:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "ownerReferences": [{"kind": "X"}],
    }
    assert errors_of(parse(InferenceJob, document)) == ()


def test_an_object_may_have_as_many_labels_and_annotations_as_kubernetes_takes() -> None:
    notes = {f"example.org/note-{number}": "" for number in range(5000)}
    document = job(**MODEL)
    document["metadata"] = {"name": "ocr", "labels": notes, "annotations": notes}
    assert errors_of(parse(InferenceJob, document)) == ()


@pytest.mark.parametrize(
    ("kind", "document", "message"),
    [
        (
            DevicePool,
            pool(budget={"memory": "64Mb"}),
            'spec.budget.memory: "64Mb" is not a quantity such as 64Mi (did you mean 64Mi?)',
        ),
        (
            DevicePool,
            pool(budget={"memory": "64m"}),
            "spec.budget.memory: 64m is less than 1Mi (did you mean 64Mi?)",
        ),
        (
            DevicePool,
            pool(budget={"memory": "1e99"}),
            "spec.budget.memory: 1e99 is more than 16Ti",
        ),
        (
            DevicePool,
            pool(budget={}),
            "spec.budget: exactly one of memory, percent must be given",
        ),
        (
            DevicePool,
            pool(budget={"memory": "1Gi", "percent": 5}),
            "spec.budget: exactly one of memory, percent must be given",
        ),
        (
            DevicePool,
            pool(local={"devices": [{"name": "a", "memory": "1Gi", "cpus": 0.5}]}),
            'spec.local.devices[0].cpus: 0.5 is a fraction: write it in quotes, "0.5"',
        ),
        (
            DevicePool,
            pool(local={"devices": [{"name": "a", "memory": "1Gi"}] * 2}),
            'spec.local.devices[1].name: "a" is the name of item [0] already',
        ),
        (DevicePool, pool(local={}), "spec.local.devices: is missing"),
        (DevicePool, pool(budget=None), "spec.budget: is empty; its fields are memory, percent"),
        (
            DevicePool,
            pool(budget={"memory": None}),
            "spec.budget: exactly one of memory, percent must be given",
        ),
        (
            InferenceJob,
            job(modelRef={"name": None}, poolRef={"name": "p"}),
            "spec.modelRef.name: is empty: give a name of small letters, digits and dashes",
        ),
        (
            DevicePool,
            pool(residencyy=None),
            "spec.residencyy: there is no such field (did you mean residency?)",
        ),
        (
            DevicePool,
            pool(residency="single"),
            'spec.residency: "single" is not one of Adaptive, Single (did you mean Single?)',
        ),
        (
            InferenceJob,
            job(**MODEL, polcy="Mabac"),
            "spec.polcy: there is no such field (did you mean policy?)",
        ),
        (
            InferenceJob,
            job(poolRef={"name": "p"}),
            "spec: exactly one of modelRef, partitionRef, placementRef must be given",
        ),
        (
            InferenceJob,
            job(placementRef={"name": "x"}, poolRef={"name": "p"}),
            "spec: exactly one of poolRef, placementRef must be given",
        ),
        (
            InferenceJob,
            job(modelRef="m", poolRef={"name": "p"}),
            'spec.modelRef: "m" is not a mapping; write {name: m}',
        ),
        (
            InferenceJob,
            job(**MODEL, backoffLimit=True),
            "spec.backoffLimit: true is not a whole number",
        ),
        (
            InferenceJob,
            job(**MODEL, activeDeadlineSeconds=0),
            "spec.activeDeadlineSeconds: 0 is outside of 1 to 2147483647",
        ),
        (
            InferenceJob,
            {**job(**MODEL), "metadata": {"name": 7}},
            "metadata.name: 7 is not a name of small letters, digits and dashes "
            "(write it in quotes)",
        ),
    ],
)
def test_an_error_says_where_what_and_what_to_do(
    kind: type, document: Mapping[str, object], message: str
) -> None:
    assert [str(error) for error in errors_of(parse(kind, document))] == [message]


def test_what_is_null_is_as_if_it_were_not_written() -> None:
    plain = pool(budget={"percent": 50}, nodeSelector={"a": "b"})
    with_nulls = pool(
        budget={"percent": 50, "memory": None},
        nodeSelector={"a": "b", "c": None},
        cache=None,
        local=None,
        residency=None,
    )
    with_nulls["metadata"] = {"name": "shelf", "labels": None, "creationTimestamp": None}
    assert parse(DevicePool, with_nulls) == parse(DevicePool, plain)
    assert errors_of(parse(DevicePool, plain)) == ()


def test_whole_numbers_may_be_written_as_floats() -> None:
    devices = [{"name": "pi", "memory": 1e8, "cpus": 2.0}]
    parsed = parse(DevicePool, pool(budget={"percent": 50.0}, local={"devices": devices}))
    assert isinstance(parsed, DevicePool)
    assert parsed.spec.local is not None
    (device,) = parsed.spec.local.devices
    assert (parsed.spec.budget.percent, device.memory, device.cpus) == (50, 10**8, 2000)
    assert type(parsed.spec.budget.percent) is int


def test_all_errors_are_told_at_once() -> None:
    document = {
        "apiVersion": "shoal.dev/v1",
        "kind": "Partition",
        "metadata": {},
        "spec": {"fragments": 0, "cuts": [], "modelref": {"name": "m"}},
    }
    assert sorted(str(error) for error in errors_of(parse(Partition, document))) == [
        'apiVersion: "shoal.dev/v1" is not shoal.dev/v1alpha1',
        'metadata.name: is missing; for example "ppocr-rec"',
        "spec.cuts: has 0 items; 1 to 255 are allowed",
        "spec.fragments: 0 is outside of 1 to 256",
        'spec.modelRef: is missing; for example {"name": "ppocr-rec"}',
        "spec.modelref: there is no such field (did you mean modelRef?)",
        "spec: at most one of fragments, maxFragmentSize, cuts, cutting may be given",
    ]
