"""The cache: what is newer wins, and who has read something is told when it changes."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from shoal_api.kinds import InferenceJob, Model, Partition
from shoal_operator.controller.cache import (
    Cache,
    Dependents,
    ObjectName,
    Own,
    Reader,
    made_for,
    reduce,
)
from shoal_operator.controller.foreign import JobState
from shoal_operator.reconcile.job_status import has_ended

NOW = "2026-03-01T12:00:00Z"


def model(name: str, version: int, *, uid: str = "", spec: object = None) -> dict[str, object]:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {
            "name": name,
            "namespace": "here",
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "generation": 1,
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": spec if spec is not None else {"source": {"uri": "pvc://models/m.onnx"}},
    }


def job(name: str, version: int, owner: str, **status: object) -> dict[str, object]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": "here",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {"shoal.dev/owner-uid": owner},
        },
        "status": status,
    }


class ConditionUpdate:
    """A cache, and what it has told."""

    def __init__(self) -> None:
        self.names: list[ObjectName] = []
        self.topics: set[tuple[str, str, str]] = set()
        self.cache = Cache(self.changed)

    def changed(
        self, name: ObjectName, topics: tuple[tuple[str, str, str], ...], by_us: bool
    ) -> None:
        self.names.append(name)
        self.topics.update(topics)

    def put(self, document: Mapping[str, object]) -> None:
        self.cache.put(reduce(document))


def test_an_older_state_or_the_same_again_tells_nothing() -> None:
    told = ConditionUpdate()
    told.put(model("m", 5))
    told.put(model("m", 5))
    told.put(model("m", 3, spec={"source": {"uri": "pvc://old/m.onnx"}}))
    assert told.names == [("Model", "here", "m")]
    own = told.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert isinstance(own.value, Model)
    assert own.value.spec.source.uri == "pvc://models/m.onnx"


def test_a_new_version_that_says_the_same_is_kept_and_tells_nothing() -> None:
    told = ConditionUpdate()
    told.put(model("m", 5))
    told.put(model("m", 6))
    assert len(told.names) == 1
    state = told.cache.state("Model", "here", "m")
    assert state is not None
    assert state.identity.version == 6


def test_another_object_of_the_same_name_takes_its_place_whatever_its_version() -> None:
    told = ConditionUpdate()
    told.put(model("m", 5, uid="first"))
    told.put(model("m", 2, uid="second"))
    state = told.cache.state("Model", "here", "m")
    assert state is not None
    assert state.identity.uid == "second"
    told.cache.remove(reduce(model("m", 6, uid="first")).identity)
    assert told.cache.count("Model") == 1


def test_a_list_removes_what_it_misses_but_not_what_came_meanwhile() -> None:
    told = ConditionUpdate()
    told.put(model("stays", 1))
    told.put(model("vanished", 2))
    with told.cache.listing("Model") as listed:
        told.put(model("new", 9))
        listed.add("uid-stays")
    assert told.cache.state("Model", "here", "vanished") is None
    assert told.cache.count("Model") == 2


def test_a_list_does_not_bring_back_what_was_deleted_while_it_was_read() -> None:
    told = ConditionUpdate()
    told.put(model("m", 1))
    with told.cache.listing("Model") as listed:
        told.cache.remove(reduce(model("m", 2)).identity)
        listed.add("uid-m")
        told.put(model("m", 1))
    assert told.cache.count("Model") == 0


def test_a_list_that_fails_removes_nothing() -> None:
    told = ConditionUpdate()
    told.put(model("m", 1))
    try:
        with told.cache.listing("Model"):
            raise OSError("the API server went away")
    except OSError:
        pass
    assert told.cache.count("Model") == 1


def test_an_object_that_does_not_parse_is_kept_with_its_errors() -> None:
    told = ConditionUpdate()
    told.put(model("m", 1, spec={"source": {"url": "https://x"}}))
    own = told.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert own.value is None
    assert any("did you mean uri" in str(error) for error in own.errors)


def test_of_a_status_of_another_version_all_that_can_be_read_stands() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": NOW}
    strange = {"type": "Glad", "status": "Maybe", "reason": "R", "lastTransitionTime": NOW}
    newer = {**ready, "type": "Fetched", "mood": "fine"}
    status = {
        "colour": "blue",
        "digest": "md5:1",
        "parameters": 7,
        "conditions": [strange, ready, strange | {"type": "Sad"}, newer],
    }
    told = ConditionUpdate()
    told.put({**model("m", 1), "status": status})
    own = told.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert isinstance(own.value, Model)
    assert own.value.status is not None
    assert [each.type for each in own.value.status.conditions] == ["Ready", "Fetched"]
    assert (own.value.status.parameters, own.value.status.digest) == (7, None)


def test_an_item_of_a_status_with_two_faults_is_lost_alone() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": NOW}
    strange = {"type": "Glad", "status": "Maybe", "lastTransitionTime": "yesterday"}
    told = ConditionUpdate()
    told.put({**model("m", 1), "status": {"conditions": [ready, strange]}})
    own = told.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert isinstance(own.value, Model)
    assert own.value.status is not None
    assert [each.type for each in own.value.status.conditions] == ["Ready"]


def test_a_job_that_ended_under_a_newer_operator_has_ended() -> None:
    done = {"type": "Complete", "status": "True", "reason": "R", "lastTransitionTime": NOW}
    document = {
        **model("j", 1),
        "kind": "InferenceJob",
        "spec": {
            "placementRef": {"name": "p"},
            "inputs": {"uri": "pvc://lines/in"},
            "outputs": {"uri": "pvc://lines/out"},
        },
        "status": {"conditions": [done], "items": {"total": 3, "postponed": 1}},
    }
    told = ConditionUpdate()
    told.put(document)
    own = told.cache.state("InferenceJob", "here", "j")
    assert isinstance(own, Own)
    assert isinstance(own.value, InferenceJob)
    assert own.value.status is not None
    assert has_ended(own.value.status)


def test_children_are_found_by_the_uid_that_they_were_made_for() -> None:
    told = ConditionUpdate()
    told.put(job("one", 1, "x"))
    told.put(job("two", 2, "x"))
    told.put(job("three", 3, "y"))
    children = ("Job", "here", made_for("x"))
    found = told.cache.members(children)
    assert [state.identity.name for state in found] == ["one", "two"]
    told.cache.remove(reduce(job("one", 4, "x")).identity)
    assert [each.identity.name for each in told.cache.members(("Job", "here", made_for("x")))] == [
        "two"
    ]
    assert isinstance(found[0], JobState)


def test_a_reader_is_told_of_exactly_what_it_read_also_of_what_was_not_there() -> None:
    told, dependents = ConditionUpdate(), Dependents()
    name = ("Partition", "here", "p")
    reader = Reader(told.cache, lambda topic: dependents.add(name, topic))
    assert reader.own(Model, "here", "m") is None
    assert reader.all_own(Partition, "here") == ()
    assert reader.members(("Job", "here", made_for("x"))) == ()

    def touched(document: Mapping[str, object]) -> bool:
        told.topics.clear()
        told.put(document)
        return any(dependents.readers(topic) for topic in told.topics)

    assert touched(model("m", 1))
    assert not touched(model("other", 2))
    assert touched(job("one", 3, "x"))
    assert not touched(job("two", 4, "y"))


def test_what_changes_after_it_was_read_and_before_the_snapshot_is_whole_is_told() -> None:
    told, dependents = ConditionUpdate(), Dependents()
    name = ("Partition", "here", "p")
    reader = Reader(told.cache, lambda topic: dependents.add(name, topic))
    reader.own(Model, "here", "m")
    told.put(model("m", 1))
    assert name in {each for topic in told.topics for each in dependents.readers(topic)}
    dependents.subscribe(name, reader.topics)
    assert dependents.readers(("Model", "here", "m")) == (name,)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.frozensets(st.sampled_from("abcd"), max_size=4)),
        max_size=30,
    )
)
def test_subscriptions_are_those_that_were_made_last(
    steps: list[tuple[int, frozenset[str]]],
) -> None:
    dependents, model_of = Dependents(), dict[int, frozenset[str]]()
    for reader, topics in steps:
        name = ("Model", "", str(reader))
        dependents.subscribe(name, frozenset(("T", "", topic) for topic in topics))
        model_of[reader] = topics
    for topic in "abcd":
        expected = {
            ("Model", "", str(each)) for each, topics in model_of.items() if topic in topics
        }
        assert set(dependents.readers(("T", "", topic))) == expected
