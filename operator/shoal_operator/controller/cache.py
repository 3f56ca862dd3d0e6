"""What the cluster looked like when it was last heard of, and who has looked at what.

Own objects are kept parsed, which is small; an object that does not parse is kept with its errors.
Whoever builds a snapshot through a `Reader` subscribes to exactly what it read, what is not there
included, before it reads it: what changes while the snapshot is being built is told as well.

Topics: `(KIND, NAMESPACE, NAME)` an object; `(KIND, NAMESPACE, "*")` any object of the namespace;
`(KIND, NAMESPACE, "+")` which objects there are, whatever they say. Kinds of the cluster have the
namespace "". `(KIND, NAMESPACE, "@UID")`: the children made for an object, as their label says.
`(KIND, NAMESPACE, ">NAME")`: those that refer to an object: Partitions to a Model, Devices to a
DevicePool, and which InferenceJobs, whatever they say, to a Placement. Coordinators add topics of
their own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from shoal_api.kinds import KINDS, AnyKind, Device, InferenceJob, Partition
from shoal_api.shapes import FieldError
from shoal_operator.controller.foreign import (
    Identity,
    JobState,
    NodeState,
    Raw,
    WorkloadState,
    identity_of,
    job_state,
    node_state,
    workload_state,
)
from shoal_operator.controller.pruning import parse_pruned
from shoal_operator.reconcile.references import placement_of

ObjectName = tuple[str, str, str]
"""Kind, namespace, name."""
Topic = tuple[str, str, str]

ANY: Final = "*"
WHICH: Final = "+"

K = TypeVar("K", bound=AnyKind)
S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """An object of one of our kinds. `value` is None when it does not parse; `errors` say why then,
    and `status` is what stands there, as it stands.
    """

    identity: Identity
    value: AnyKind | None
    errors: tuple[FieldError, ...] = ()
    status: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> ObjectName:
        """Kind, namespace and name."""
        return self.identity.kind, self.identity.namespace, self.identity.name


State = Own | JobState | WorkloadState | NodeState


def reduce(document: Mapping[str, object]) -> State:
    """An object as the API server gives it, as the cache keeps it."""
    kind = document.get("kind")
    match kind:
        case "Job":
            return job_state(document)
        case "Deployment" | "DaemonSet":
            return workload_state(document)
        case "Node":
            return node_state(document)
        case _:
            assert isinstance(kind, str), "an object without a kind"
            return _own(kind, document)


def _own(kind: str, document: Mapping[str, object]) -> Own:
    identity = identity_of(document)
    value = parse_pruned(KINDS[kind].cls, document)
    if isinstance(value, tuple):
        status = Raw(document).table("status").value
        return Own(identity=identity, value=None, errors=value, status=status)
    return Own(identity=identity, value=value)


class Cache:
    """`changed` is called with each object that changed, the topics that this touches, and whether
    it is the operator's own writing.
    """

    def __init__(self, changed: Callable[[ObjectName, tuple[Topic, ...], bool], None]) -> None:
        self._states: dict[tuple[str, str], dict[str, State]] = {}
        self._changed = changed
        self._removed: set[str] | None = None
        self._groups: dict[Topic, set[str]] = {}

    def put(self, state: State, *, by_us: bool = False) -> None:
        """An object was seen. One older than what is known, or the same, changes nothing."""
        identity = state.identity
        states = self._states.setdefault((identity.kind, identity.namespace), {})
        known = states.get(identity.name)
        if known is not None and known.identity.uid == identity.uid:
            if known.identity.version >= identity.version:
                return
            if _same(known, state):
                states[identity.name] = state
                return
        if self._removed is not None and identity.uid in self._removed:
            return
        states[identity.name] = state
        came = known is None or known.identity.uid != identity.uid
        left = frozenset[Topic]()
        if known is not None:
            self._leave(known)
            left = frozenset(_groups(known)) - frozenset(_groups(state))
        for group in _groups(state):
            self._groups.setdefault(group, set()).add(identity.name)
        self._tell(state, came_or_went=came, by_us=by_us, left=left)

    def remove(self, identity: Identity) -> None:
        """An object is gone; nothing happens when another of its name is there."""
        if self._removed is not None:
            self._removed.add(identity.uid)
        states = self._states.get((identity.kind, identity.namespace), {})
        known = states.get(identity.name)
        if known is None or known.identity.uid != identity.uid:
            return
        del states[identity.name]
        if not states:
            del self._states[identity.kind, identity.namespace]
        self._leave(known)
        self._tell(known, came_or_went=True)

    @contextmanager
    def listing(self, kind: str) -> Iterator[set[str]]:
        """While all objects of a kind are listed; the caller adds the uids on the list. At a good
        end, those known before and not on the list are removed. One list at a time.
        """
        before = {each.identity.uid for each in self.states(kind)}
        listed: set[str] = set()
        self._removed = set()
        try:
            yield listed
        finally:
            self._removed = None
        for state in tuple(self.states(kind)):
            if state.identity.uid in before - listed:
                self.remove(state.identity)

    def knows(self, identity: Identity) -> bool:
        """Whether this state of the object, or a newer one, was seen already."""
        known = self.state(identity.kind, identity.namespace, identity.name)
        if known is None or known.identity.uid != identity.uid:
            return False
        return known.identity.version >= identity.version

    def state(self, kind: str, namespace: str, name: str) -> State | None:
        """An object, without subscribing."""
        return self._states.get((kind, namespace), {}).get(name)

    def states(self, kind: str, namespace: str | None = None) -> Iterator[State]:
        """The objects of a kind, of one namespace or of all."""
        if namespace is not None:
            yield from self._states.get((kind, namespace), {}).values()
            return
        for (each, _), states in self._states.items():
            if each == kind:
                yield from states.values()

    def made_for(self, kind: str, namespace: str, uid: str) -> tuple[State, ...]:
        """The children of a kind that carry an object's uid as their label, by name."""
        return self._members((kind, namespace, f"@{uid}"))

    def referring(self, kind: str, namespace: str, name: str) -> tuple[State, ...]:
        """The objects of a kind that refer to an object, by name."""
        return self._members((kind, namespace, f">{name}"))

    def count(self, kind: str) -> int:
        """How many objects of a kind there are."""
        return sum(len(states) for (each, _), states in self._states.items() if each == kind)

    def _members(self, group: Topic) -> tuple[State, ...]:
        kind, namespace, _ = group
        names = self._groups.get(group)
        return tuple(self._states[kind, namespace][name] for name in sorted(names or ()))

    def _leave(self, state: State) -> None:
        for group in _groups(state):
            names = self._groups[group]
            names.discard(state.identity.name)
            if not names:
                del self._groups[group]

    def _tell(
        self,
        state: State,
        *,
        came_or_went: bool,
        by_us: bool = False,
        left: frozenset[Topic] = frozenset(),
    ) -> None:
        kind, namespace = state.identity.kind, state.identity.namespace
        name = (kind, namespace, state.identity.name)
        topics: tuple[Topic, ...] = (name, (kind, namespace, ANY), *left)
        if came_or_went:
            topics = (*topics, (kind, namespace, WHICH))
        if came_or_went or kind != InferenceJob.__name__:
            topics = (*topics, *_groups(state))
        self._changed(name, topics, by_us)


def _groups(state: State) -> Iterator[Topic]:
    """What an object belongs to."""
    identity = state.identity
    if identity.owner_uid:
        yield (identity.kind, identity.namespace, f"@{identity.owner_uid}")
    match state:
        case Own(value=Partition() as partition):
            yield (identity.kind, identity.namespace, f">{partition.spec.model_ref.name}")
        case Own(value=Device() as device):
            yield (identity.kind, identity.namespace, f">{device.spec.pool_ref.name}")
        case Own(value=InferenceJob() as job):
            yield (identity.kind, identity.namespace, f">{placement_of(job)}")
        case _:
            pass


def _same(one: State, other: State) -> bool:
    """Whether they differ in their version only."""
    identity = replace(one.identity, version=other.identity.version)
    if identity != other.identity:
        return False
    if isinstance(one, Own) and isinstance(other, Own):
        return one.errors == other.errors and _unversioned(one.value) == _unversioned(other.value)
    return replace(one, identity=identity) == other


def _unversioned(value: AnyKind | None) -> AnyKind | None:
    if value is None:
        return None
    return replace(value, metadata=replace(value.metadata, resource_version=None))


class Dependents:
    """Who has read which topics."""

    def __init__(self) -> None:
        self._topics: dict[ObjectName, frozenset[Topic]] = {}
        self._readers: dict[Topic, set[ObjectName]] = {}

    def subscribe(self, reader: ObjectName, topics: frozenset[Topic]) -> None:
        """What a reader has read now takes the place of what it read before."""
        before = self._topics.get(reader, frozenset())
        for topic in before - topics:
            readers = self._readers[topic]
            readers.discard(reader)
            if not readers:
                del self._readers[topic]
        for topic in topics - before:
            self._readers.setdefault(topic, set()).add(reader)
        if topics:
            self._topics[reader] = topics
        else:
            self._topics.pop(reader, None)

    def add(self, reader: ObjectName, topic: Topic) -> None:
        """A reader is about to read one thing more."""
        self._topics[reader] = self._topics.get(reader, frozenset()) | {topic}
        self._readers.setdefault(topic, set()).add(reader)

    def readers(self, topic: Topic) -> tuple[ObjectName, ...]:
        """Whose snapshots a topic is part of."""
        return tuple(self._readers.get(topic, ()))


class Reader:
    """One look at the cache. `about_to_read` is called with each topic before it is read."""

    def __init__(self, cache: Cache, about_to_read: Callable[[Topic], None]) -> None:
        self._cache = cache
        self._about_to_read = about_to_read
        self._topics: set[Topic] = set()

    @property
    def topics(self) -> frozenset[Topic]:
        """What was read."""
        return frozenset(self._topics)

    def subscribe(self, topic: Topic) -> None:
        """Something is about to be read, here or elsewhere."""
        if topic not in self._topics:
            self._topics.add(topic)
            self._about_to_read(topic)

    def own(self, cls: type[K], namespace: str, name: str | None) -> K | None:
        """One of our objects; None when it is not there, or does not parse."""
        if name is None:
            return None
        state = self.state(cls.__name__, namespace, name)
        value = state.value if isinstance(state, Own) else None
        return value if isinstance(value, cls) else None

    def all_own(self, cls: type[K], namespace: str) -> tuple[K, ...]:
        """All our objects of a kind and namespace that parse, by name."""
        self.subscribe((cls.__name__, namespace, ANY))
        values = (
            state.value
            for state in self._cache.states(cls.__name__, namespace)
            if isinstance(state, Own)
        )
        found = [value for value in values if isinstance(value, cls)]
        return tuple(sorted(found, key=lambda value: value.metadata.name))

    def own_referring(self, cls: type[K], namespace: str, name: str) -> tuple[K, ...]:
        """Our objects of a kind that parse and refer to an object, by name."""
        self.subscribe((cls.__name__, namespace, f">{name}"))
        states = self._cache.referring(cls.__name__, namespace, name)
        values = (state.value for state in states if isinstance(state, Own))
        return tuple(value for value in values if isinstance(value, cls))

    def state(self, kind: str, namespace: str, name: str) -> State | None:
        """Any object that is kept."""
        self.subscribe((kind, namespace, name))
        return self._cache.state(kind, namespace, name)

    def states(self, kind: str, namespace: str) -> tuple[State, ...]:
        """All objects of a kind and namespace."""
        self.subscribe((kind, namespace, ANY))
        return tuple(self._cache.states(kind, namespace))

    def made_for(self, kind: str, namespace: str, uid: str) -> tuple[State, ...]:
        """The children of a kind that carry an object's uid as their label, by name."""
        self.subscribe((kind, namespace, f"@{uid}"))
        return self._cache.made_for(kind, namespace, uid)

    def which(self, kind: str, namespace: str) -> None:
        """Which objects there are, whatever they say."""
        self.subscribe((kind, namespace, WHICH))
