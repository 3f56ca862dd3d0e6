"""Whether an object still says what was applied to it, as a new operator sees it."""

import pytest

from reconcile.test_device_pool import children, see
from shoal_operator.controller.cache import reduce
from shoal_operator.controller.children import includes, matches
from shoal_operator.reconcile.decision import Manifest


def live(manifest: Manifest, **edits: object) -> dict[str, object]:
    """As the API server gives it back: with defaults, without what is empty."""
    spec = manifest["spec"]
    assert isinstance(spec, dict)
    spec = {**spec, "progressDeadlineSeconds": 600, "revisionHistoryLimit": 10, **edits}
    metadata = {"name": "shelf-coordinator", "namespace": "lab", "uid": "u", "generation": 3}
    return {**manifest, "metadata": metadata, "spec": spec}


def test_defaults_are_no_difference_and_an_edit_is_one() -> None:
    (deployment,) = children(see(), "Deployment").values()
    assert matches(deployment, reduce(live(deployment)))
    assert not matches(deployment, reduce(live(deployment, replicas=0)))
    assert not matches(deployment, reduce(live(deployment, template={})))


@pytest.mark.parametrize(
    ("there", "wanted", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": False, "b": "", "c": [], "d": {}, "e": 0}, True),
        ({}, {"a": True}, False),
        ({"a": [{"x": 1, "more": 2}]}, {"a": [{"x": 1}]}, True),
        ({"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 1}]}, False),
        ({"a": None}, {"a": {"x": 1}}, False),
    ],
)
def test_everything_wanted_must_be_there(there: object, wanted: object, same: bool) -> None:
    assert includes(there, wanted) is same
