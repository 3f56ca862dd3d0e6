"""partition.json: read back as written, and refused with the field's path when it is wrong."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_protocol.digests import Digest
from shoal_protocol.partition import (
    MODEL,
    DocumentRefused,
    Edge,
    Fragment,
    PartitionDocument,
    TensorSpec,
    Work,
    document_from_json,
    document_to_json,
)


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float", shape=("batch", 3, None))


def fragment(index: int, takes: str, gives: str) -> Fragment:
    return Fragment(
        index=index,
        digest=Digest("sha256:" + f"{index:064x}"),
        nodes=3,
        weight_bytes=100,
        resident_bytes=1000,
        least_bytes=400,
        activation_bytes=None,
        flops=12,
        inputs=(spec(takes),),
        outputs=(TensorSpec(name=gives, dtype="int64", shape=None),),
        work=None if index else Work(convolution=5, matrix=6, memory=7),
    )


DOCUMENT = PartitionDocument(
    model_digest=Digest("sha256:" + "a" * 64),
    fragments=(fragment(0, "x", "a"), fragment(1, "a", "y")),
    edges=(
        Edge(producer=MODEL, consumer=0, tensors=("x",), bytes_per_item=12),
        Edge(producer=0, consumer=1, tensors=("a",), bytes_per_item=None),
        Edge(producer=1, consumer=MODEL, tensors=("y",), bytes_per_item=4),
    ),
    inputs=(spec("x"),),
    outputs=(spec("y"),),
)


def test_a_document_reads_back_as_it_was() -> None:
    text = document_to_json(DOCUMENT)
    assert document_from_json(text) == DOCUMENT
    assert document_from_json(text.encode()) == DOCUMENT
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


def test_a_document_of_before_work_was_estimated_has_none() -> None:
    top = json.loads(document_to_json(DOCUMENT))
    for each in top["fragments"]:
        del each["work"]
    read = document_from_json(json.dumps(top))
    assert [each.work for each in read.fragments] == [None, None]


def test_a_document_of_before_blocks_needs_what_is_resident() -> None:
    top = json.loads(document_to_json(DOCUMENT))
    for each in top["fragments"]:
        del each["least_bytes"]
    read = document_from_json(json.dumps(top))
    assert [each.least_bytes for each in read.fragments] == [1000, 1000]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda top: top.update(version=2),
    "model_digest": lambda top: top.update(model_digest="abc"),
    "fragments[1].index": lambda top: top["fragments"][1].update(index=0),
    "fragments[0].nodes": lambda top: top["fragments"][0].update(nodes=-1),
    "fragments[0].flops": lambda top: top["fragments"][0].update(flops=1.5),
    "fragments[0].weight_bytes": lambda top: top["fragments"][0].update(weight_bytes=2**63),
    "fragments[0].least_bytes": lambda top: top["fragments"][0].update(least_bytes=1001),
    "fragments[0].inputs[0].dtype": lambda top: top["fragments"][0]["inputs"][0].update(dtype=""),
    "fragments[0].inputs[0].shape[1]": lambda top: top["fragments"][0]["inputs"][0].update(
        shape=[1, True]
    ),
    "fragments[0].work.matrix": lambda top: top["fragments"][0]["work"].update(matrix=-1),
    "fragments[1].digest": lambda top: top["fragments"][1].pop("digest"),
    "edges[1]": lambda top: top["edges"][1].update(producer=1),
    "edges[0].tensors": lambda top: top["edges"][0].update(tensors=["z"]),
    "edges": lambda top: top["edges"].pop(0),
    "inputs": lambda top: top.update(inputs={}),
    "outputs": lambda top: top.update(outputs=top["outputs"] * 2),
}


@pytest.mark.parametrize("where", CHANGES)
def test_a_wrong_field_is_named(where: str) -> None:
    top = json.loads(document_to_json(DOCUMENT))
    CHANGES[where](top)
    with pytest.raises(DocumentRefused, match=f"^partition document, {re.escape(where)}: "):
        document_from_json(json.dumps(top))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", "[" * 10_000, b"\xff\xfe"])
def test_what_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(DocumentRefused):
        document_from_json(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    top = json.loads(document_to_json(DOCUMENT))
    place: Any = top
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            place[key] = data.draw(values)
            break
        place = inner
    try:
        assert isinstance(document_from_json(json.dumps(top)), PartitionDocument)
    except DocumentRefused:
        return
