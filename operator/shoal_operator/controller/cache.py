"""The informers' cache: the last known state of each object, and which snapshot depends on what.

Own objects are stored parsed, which is small; an object that does not parse is stored with its
errors. A snapshot is built through a `Reader`, which subscribes to exactly what it reads, missing
objects included, before it reads it; so a change during the build causes a new one.

Topics: `(KIND, NAMESPACE, NAME)` an object; `(KIND, NAMESPACE, "*")` any object of the namespace;
`(KIND, NAMESPACE, "+")` the set of objects, whatever they contain. Kinds of the cluster have the
namespace "". `(KIND, NAMESPACE, "@UID")`: the children of an object, by their label.
`(KIND, NAMESPACE, ">NAME")`: the objects that refer to another one: Partitions to a Model, Devices
to a DevicePool, and the set of InferenceJobs, whatever they contain, to a Placement. Coordinators
add topics of their own.
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
from shoal_operator.reconcile.names import placement_of

ObjectName = tuple[str, str, str]
"""Kind, namespace, name."""
Topic = tuple[str, str, str]

ANY: Final = "*"
WHICH: Final = "+"

K = TypeVar("K", bound=AnyKind)
S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """An object of one of our kinds. `value` is None if it does not parse; then `errors` say why,
    and `status` is the unparsed status.
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
    """What the cache stores of an object that the API server has sent."""
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
    """Calls `changed` with each object that changed, the topics that this concerns, and whether the
    operator has written it.
    """

    def __init__(self, changed: Callable[[ObjectName, tuple[Topic, ...], bool], None]) -> None:
        self._states: dict[tuple[str, str], dict[str, State]] = {}
        self._changed = changed
        self._removed: set[str] | None = None
        self._groups: dict[Topic, set[str]] = {}

    def put(self, state: State, *, by_us: bool = False) -> None:
        """Store an object, unless it is not newer than the one that is stored."""
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
        is_new = known is None or known.identity.uid != identity.uid
        left = frozenset[Topic]()
        if known is not None:
            self._unindex(known)
            left = frozenset(_groups(known)) - frozenset(_groups(state))
        for group in _groups(state):
            self._groups.setdefault(group, set()).add(identity.name)
        self._notify(state, membership_changed=is_new, by_us=by_us, left=left)

    def remove(self, identity: Identity) -> None:
        """An object was deleted; another one of the same name stays."""
        if self._removed is not None:
            self._removed.add(identity.uid)
        states = self._states.get((identity.kind, identity.namespace), {})
        known = states.get(identity.name)
        if known is None or known.identity.uid != identity.uid:
            return
        del states[identity.name]
        if not states:
            del self._states[identity.kind, identity.namespace]
        self._unindex(known)
        self._notify(known, membership_changed=True)

    @contextmanager
    def listing(self, kind: str) -> Iterator[set[str]]:
        """Replace a kind by a list: the caller adds each uid on the list. If it succeeds, objects
        that were stored before and are not on the list are removed. One list at a time.
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
        """Whether this version of the object, or a newer one, is stored."""
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
        """The children of an object, of one kind, by name."""
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

    def _unindex(self, state: State) -> None:
        for group in _groups(state):
            names = self._groups[group]
            names.discard(state.identity.name)
            if not names:
                del self._groups[group]

    def _notify(
        self,
        state: State,
        *,
        membership_changed: bool,
        by_us: bool = False,
        left: frozenset[Topic] = frozenset(),
    ) -> None:
        kind, namespace = state.identity.kind, state.identity.namespace
        name = (kind, namespace, state.identity.name)
        topics: tuple[Topic, ...] = (name, (kind, namespace, ANY), *left)
        if membership_changed:
            topics = (*topics, (kind, namespace, WHICH))
        if membership_changed or kind != InferenceJob.__name__:
            topics = (*topics, *_groups(state))
        self._changed(name, topics, by_us)


def _groups(state: State) -> Iterator[Topic]:
    """The groups that an object belongs to, as topics."""
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
    """Which readers depend on which topics."""

    def __init__(self) -> None:
        self._topics: dict[ObjectName, frozenset[Topic]] = {}
        self._readers: dict[Topic, set[ObjectName]] = {}

    def subscribe(self, reader: ObjectName, topics: frozenset[Topic]) -> None:
        """Replace the topics that a reader depends on."""
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
        """Add a topic that a reader is about to read."""
        self._topics[reader] = self._topics.get(reader, frozenset()) | {topic}
        self._readers.setdefault(topic, set()).add(reader)

    def readers(self, topic: Topic) -> tuple[ObjectName, ...]:
        """The readers that depend on a topic."""
        return tuple(self._readers.get(topic, ()))


class Reader:
    """Reads for one snapshot. Calls `about_to_read` with each topic before it reads it."""

    def __init__(self, cache: Cache, about_to_read: Callable[[Topic], None]) -> None:
        self._cache = cache
        self._about_to_read = about_to_read
        self._topics: set[Topic] = set()

    @property
    def topics(self) -> frozenset[Topic]:
        """The topics that were read."""
        return frozenset(self._topics)

    def subscribe(self, topic: Topic) -> None:
        """A topic is about to be read, here or elsewhere."""
        if topic not in self._topics:
            self._topics.add(topic)
            self._about_to_read(topic)

    def own(self, cls: type[K], namespace: str, name: str | None) -> K | None:
        """One of our objects; None if it does not exist or does not parse."""
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
        """Any object that is stored."""
        self.subscribe((kind, namespace, name))
        return self._cache.state(kind, namespace, name)

    def states(self, kind: str, namespace: str) -> tuple[State, ...]:
        """All objects of a kind and namespace."""
        self.subscribe((kind, namespace, ANY))
        return tuple(self._cache.states(kind, namespace))

    def made_for(self, kind: str, namespace: str, uid: str) -> tuple[State, ...]:
        """The children of an object, of one kind, by name."""
        self.subscribe((kind, namespace, f"@{uid}"))
        return self._cache.made_for(kind, namespace, uid)

    def which(self, kind: str, namespace: str) -> None:
        """Subscribe to the set of objects, whatever they contain."""
        self.subscribe((kind, namespace, WHICH))
