"""Records written as JSON and read back."""

import json

import pytest

from kind_reference import example_document
from shoal_api.kinds import KINDS, InferenceJob, KindNames
from shoal_api.schema import API_VERSION, parse
from shoal_api.writing import write


@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)
def test_what_is_written_is_read_back_as_the_same_value(names: KindNames) -> None:
    value = parse(names.cls, example_document(names))
    assert not isinstance(value, tuple), value
    written = {"apiVersion": API_VERSION, "kind": names.cls.__name__, **write(value)}
    assert parse(names.cls, json.loads(json.dumps(written))) == value


def test_a_status_is_written_and_read_back_with_all_that_it_says() -> None:
    document = {
        "apiVersion": API_VERSION,
        "kind": "InferenceJob",
        "metadata": {"name": "ocr"},
        "spec": {
            "placementRef": {"name": "p"},
            "inputs": {"uri": "pvc://lines/in"},
            "outputs": {"uri": "pvc://lines/out"},
        },
        "status": {
            "observedGeneration": 1,
            "items": {"total": 4, "failed": 1},
            "itemsPerSecond": 0.5,
            "tierHits": {"evict": 2},
            "failures": [{"item": 3, "reason": "wrong shape"}],
            "conditions": [
                {
                    "type": "Planned",
                    "status": "True",
                    "reason": "Planned",
                    "lastTransitionTime": "2026-01-31T12:00:00Z",
                }
            ],
        },
    }
    value = parse(InferenceJob, document)
    assert not isinstance(value, tuple), value
    assert value.status is not None
    status = json.loads(json.dumps(write(value.status)))
    assert parse(InferenceJob, {**document, "status": status}) == value
    assert status["conditions"][0]["lastTransitionTime"] == "2026-01-31T12:00:00Z"
