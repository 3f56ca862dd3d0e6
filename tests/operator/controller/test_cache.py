"""The cache: what is newer wins, and who has read something is notified when it changes."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from reconcile.values import NAMESPACE, make
from shoal_api.kinds import DevicePool, InferenceJob, Model, Partition
from shoal_api.writing import write
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
from shoal_operator.controller.snapshots import job_ids, sets_of_others
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


class Recorder:
    """A cache, and what it has reported."""

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


def test_an_older_state_or_the_same_again_reports_nothing() -> None:
    recorder = Recorder()
    recorder.put(model("m", 5))
    recorder.put(model("m", 5))
    recorder.put(model("m", 3, spec={"source": {"uri": "pvc://old/m.onnx"}}))
    assert recorder.names == [("Model", "here", "m")]
    own = recorder.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert isinstance(own.value, Model)
    assert own.value.spec.source.uri == "pvc://models/m.onnx"


def test_a_new_version_that_says_the_same_is_stored_and_reports_nothing() -> None:
    recorder = Recorder()
    recorder.put(model("m", 5))
    recorder.put(model("m", 6))
    assert len(recorder.names) == 1
    state = recorder.cache.state("Model", "here", "m")
    assert state is not None
    assert state.identity.version == 6


def test_another_object_of_the_same_name_takes_its_place_whatever_its_version() -> None:
    recorder = Recorder()
    recorder.put(model("m", 5, uid="first"))
    recorder.put(model("m", 2, uid="second"))
    state = recorder.cache.state("Model", "here", "m")
    assert state is not None
    assert state.identity.uid == "second"
    recorder.cache.remove(reduce(model("m", 6, uid="first")).identity)
    assert recorder.cache.count("Model") == 1


def test_a_list_removes_what_it_misses_but_not_what_came_meanwhile() -> None:
    recorder = Recorder()
    recorder.put(model("stays", 1))
    recorder.put(model("vanished", 2))
    with recorder.cache.listing("Model") as listed:
        recorder.put(model("new", 9))
        listed.add("uid-stays")
    assert recorder.cache.state("Model", "here", "vanished") is None
    assert recorder.cache.count("Model") == 2


def test_a_list_of_one_namespace_removes_nothing_from_others() -> None:
    recorder = Recorder()
    recorder.put(model("here", 1))
    with recorder.cache.listing("Model", "elsewhere"):
        pass
    assert recorder.cache.count("Model") == 1
    with recorder.cache.listing("Model", "here"):
        pass
    assert recorder.cache.count("Model") == 0


def test_a_list_does_not_bring_back_what_was_deleted_while_it_was_read() -> None:
    recorder = Recorder()
    recorder.put(model("m", 1))
    with recorder.cache.listing("Model") as listed:
        recorder.cache.remove(reduce(model("m", 2)).identity)
        listed.add("uid-m")
        recorder.put(model("m", 1))
    assert recorder.cache.count("Model") == 0


def test_a_list_that_fails_removes_nothing() -> None:
    recorder = Recorder()
    recorder.put(model("m", 1))
    try:
        with recorder.cache.listing("Model"):
            raise OSError("the API server went away")
    except OSError:
        pass
    assert recorder.cache.count("Model") == 1


def test_an_object_that_does_not_parse_is_kept_with_its_errors() -> None:
    recorder = Recorder()
    recorder.put(model("m", 1, spec={"source": {"url": "https://x"}}))
    own = recorder.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert own.value is None
    assert any("did you mean uri" in str(error) for error in own.errors)


def test_of_a_status_of_another_version_all_that_can_be_read_is_kept() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": NOW}
    strange = {"type": "Glad", "status": "Maybe", "reason": "R", "lastTransitionTime": NOW}
    newer = {**ready, "type": "Fetched", "mood": "fine"}
    status = {
        "colour": "blue",
        "digest": "md5:1",
        "parameters": 7,
        "conditions": [strange, ready, strange | {"type": "Sad"}, newer],
    }
    recorder = Recorder()
    recorder.put({**model("m", 1), "status": status})
    own = recorder.cache.state("Model", "here", "m")
    assert isinstance(own, Own)
    assert isinstance(own.value, Model)
    assert own.value.status is not None
    assert [each.type for each in own.value.status.conditions] == ["Ready", "Fetched"]
    assert (own.value.status.parameters, own.value.status.digest) == (7, None)


def test_an_item_of_a_status_with_two_faults_is_lost_alone() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": NOW}
    strange = {"type": "Glad", "status": "Maybe", "lastTransitionTime": "yesterday"}
    recorder = Recorder()
    recorder.put({**model("m", 1), "status": {"conditions": [ready, strange]}})
    own = recorder.cache.state("Model", "here", "m")
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
    recorder = Recorder()
    recorder.put(document)
    own = recorder.cache.state("InferenceJob", "here", "j")
    assert isinstance(own, Own)
    assert isinstance(own.value, InferenceJob)
    assert own.value.status is not None
    assert has_ended(own.value.status)


def test_children_are_found_by_the_uid_that_they_were_made_for() -> None:
    recorder = Recorder()
    recorder.put(job("one", 1, "x"))
    recorder.put(job("two", 2, "x"))
    recorder.put(job("three", 3, "y"))
    children = ("Job", "here", made_for("x"))
    found = recorder.cache.members(children)
    assert [state.identity.name for state in found] == ["one", "two"]
    recorder.cache.remove(reduce(job("one", 4, "x")).identity)
    assert [
        each.identity.name for each in recorder.cache.members(("Job", "here", made_for("x")))
    ] == ["two"]
    assert isinstance(found[0], JobState)


def test_a_reader_is_notified_of_exactly_what_it_read_also_of_what_did_not_exist() -> None:
    recorder, dependents = Recorder(), Dependents()
    name = ("Partition", "here", "p")
    reader = Reader(recorder.cache, lambda topic: dependents.add(name, topic))
    assert reader.own(Model, "here", "m") is None
    assert reader.all_own(Partition, "here") == ()
    assert reader.members(("Job", "here", made_for("x"))) == ()

    def touched(document: Mapping[str, object]) -> bool:
        recorder.topics.clear()
        recorder.put(document)
        return any(dependents.readers(topic) for topic in recorder.topics)

    assert touched(model("m", 1))
    assert not touched(model("other", 2))
    assert touched(job("one", 3, "x"))
    assert not touched(job("two", 4, "y"))


def test_what_changes_after_it_was_read_and_before_the_snapshot_is_complete_is_reported() -> None:
    recorder, dependents = Recorder(), Dependents()
    name = ("Partition", "here", "p")
    reader = Reader(recorder.cache, lambda topic: dependents.add(name, topic))
    reader.own(Model, "here", "m")
    recorder.put(model("m", 1))
    assert name in {each for topic in recorder.topics for each in dependents.readers(topic)}
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


def test_the_agents_of_other_pools_are_known_by_name_as_long_as_their_pools_exist() -> None:
    cache = Cache(lambda *_: None)
    spec = {"nodeSelector": {"kind": "pi"}, "budget": {"percent": 50}}
    one, other = (make(DevicePool, name, spec, uid=name) for name in ("lab", "lab-agent"))
    for each in (one, other):
        cache.put(reduce({"kind": "DevicePool", **write(each)}))
    for owner in ("lab", "lab-agent", "gone"):
        document = job(f"of-{owner}", 1, owner) | {"apiVersion": "apps/v1", "kind": "DaemonSet"}
        metadata = document["metadata"]
        assert isinstance(metadata, dict)
        cache.put(reduce(document | {"metadata": metadata | {"namespace": NAMESPACE}}))
    assert sets_of_others(cache, one) == {"of-lab-agent"}
    assert sets_of_others(cache, other) == {"of-lab"}


def test_a_job_that_cannot_be_read_keeps_its_own_run_and_no_other_jobs() -> None:
    """The kinds of the cluster may be of a newer version; runs of jobs that are gone stop."""
    cache = Recorder().cache
    for name, leaving in (("newer", None), ("run", None), ("gone", NOW)):
        metadata = {
            **{"name": name, "namespace": NAMESPACE, "uid": f"0123456789-{name}"},
            **{"resourceVersion": "1", "deletionTimestamp": leaving},
        }
        cache.put(reduce({"kind": "InferenceJob", "metadata": metadata, "spec": {"new": name}}))
    reader = Reader(cache, lambda topic: None)
    assert job_ids(reader, cache, NAMESPACE) == {"newer-01234567", "run-01234567"}
    assert reader.topics == {("InferenceJob", NAMESPACE, "+")}
