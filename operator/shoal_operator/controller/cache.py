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

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from shoal_api.kinds import KINDS, AnyKind, Device, InferenceJob, Partition, Placement
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
        known = self.state(identity.kind, identity.namespace, identity.name)
        if known is not None and known.identity.uid == identity.uid:
            if known.identity.version >= identity.version:
                return
            if _same(known, state):
                self._states[identity.kind, identity.namespace][identity.name] = state
                return
        if self._removed is None or identity.uid not in self._removed:
            self._replace(identity, known, state, by_us=by_us)

    def remove(self, identity: Identity) -> None:
        """An object was deleted; another one of the same name stays."""
        if self._removed is not None:
            self._removed.add(identity.uid)
        known = self.state(identity.kind, identity.namespace, identity.name)
        if known is not None and known.identity.uid == identity.uid:
            self._replace(identity, known, None)

    @contextmanager
    def listing(self, kind: str, namespace: str = "") -> Iterator[set[str]]:
        """Replace a kind by a list, of one namespace or of all: the caller adds each uid on the
        list. If it succeeds, objects that were stored before and are not on the list are removed.
        One list at a time.
        """
        scope = namespace or None
        before = {each.identity.uid for each in self.states(kind, scope)}
        listed: set[str] = set()
        self._removed = set()
        try:
            yield listed
        finally:
            self._removed = None
        for state in tuple(self.states(kind, scope)):
            if state.identity.uid in before - listed:
                self.remove(state.identity)

    def put_document(self, document: Mapping[str, object]) -> Identity:
        """Store an object as the API server has sent it; its identity. It is parsed only if this
        version is not stored yet.
        """
        identity = identity_of(document)
        known = self.state(identity.kind, identity.namespace, identity.name)
        if (
            known is None
            or known.identity.uid != identity.uid
            or known.identity.version < identity.version
        ):
            self.put(reduce(document))
        return identity

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

    def members(self, topic: Topic) -> tuple[State, ...]:
        """The objects of a group, by name; the topic is of `ANY`, `made_for` or `referring`."""
        kind, namespace, group = topic
        states = self._states.get((kind, namespace), {})
        names = states if group == ANY else self._groups.get(topic, ())
        return tuple(states[name] for name in sorted(names))

    def own(self, cls: type[K], namespace: str, name: str) -> K | None:
        """One of our objects; None if it does not exist or does not parse."""
        return _value(cls, self.state(cls.__name__, namespace, name))

    def all_own(self, cls: type[K], namespace: str) -> Iterator[K]:
        """Our objects of a kind and namespace that parse."""
        for state in self.states(cls.__name__, namespace):
            value = _value(cls, state)
            if value is not None:
                yield value

    def count(self, kind: str) -> int:
        """How many objects of a kind there are."""
        return sum(len(states) for (each, _), states in self._states.items() if each == kind)

    def _replace(
        self, identity: Identity, old: State | None, new: State | None, *, by_us: bool = False
    ) -> None:
        kind, namespace, name = identity.kind, identity.namespace, identity.name
        before, after = ([] if each is None else _groups(each) for each in (old, new))
        left = [group for group in before if group not in after]
        for group in left:
            self._groups[group].discard(name)
            if not self._groups[group]:
                del self._groups[group]
        for group in after:
            self._groups.setdefault(group, set()).add(name)
        states = self._states.setdefault((kind, namespace), {})
        if new is not None:
            states[name] = new
        else:
            del states[name]
            if not states:
                del self._states[kind, namespace]
        topics = [(kind, namespace, name), (kind, namespace, ANY), *left]
        is_other = old is None or new is None or old.identity.uid != new.identity.uid
        if is_other:
            topics.append((kind, namespace, WHICH))
        if is_other or kind != InferenceJob.__name__:
            topics += after
        self._changed((kind, namespace, name), tuple(topics), by_us)


def made_for(uid: str) -> str:
    """The group of an object's children."""
    return f"@{uid}"


def referring(name: str) -> str:
    """The group of objects that refer to another one."""
    return f">{name}"


def _groups(state: State) -> list[Topic]:
    """The groups that an object belongs to, as topics."""
    identity = state.identity
    groups = [made_for(identity.owner_uid)] if identity.owner_uid else []
    match state:
        case Own(value=Partition() as partition):
            groups.append(referring(partition.spec.model_ref.name))
        case Own(value=Placement() as placement):
            groups.append(referring(placement.spec.partition_ref.name))
        case Own(value=Device() as device):
            groups.append(referring(device.spec.pool_ref.name))
        case Own(value=InferenceJob() as job):
            groups.append(referring(placement_of(job)))
        case _:
            pass
    return [(identity.kind, identity.namespace, group) for group in groups]


def _value(cls: type[K], state: State | None) -> K | None:
    value = state.value if isinstance(state, Own) else None
    return value if isinstance(value, cls) else None


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
        self._topics: dict[ObjectName, set[Topic]] = {}
        self._readers: dict[Topic, set[ObjectName]] = {}

    def subscribe(self, reader: ObjectName, topics: Set[Topic]) -> None:
        """Replace the topics that a reader depends on."""
        for topic in self._topics.pop(reader, set()) - topics:
            self._readers[topic].discard(reader)
            if not self._readers[topic]:
                del self._readers[topic]
        for topic in topics:
            self.add(reader, topic)

    def add(self, reader: ObjectName, topic: Topic) -> None:
        """Add a topic that a reader is about to read."""
        self._topics.setdefault(reader, set()).add(topic)
        self._readers.setdefault(topic, set()).add(reader)

    def readers(self, topic: Topic) -> tuple[ObjectName, ...]:
        """The readers that depend on a topic."""
        return tuple(self._readers.get(topic, ()))


class Reader:
    """Reads for one snapshot. Calls `about_to_read` with each topic before it reads it.

    `topics` are those that were read. What was read may change within `requeue_seconds` without an
    event.
    """

    def __init__(self, cache: Cache, about_to_read: Callable[[Topic], None]) -> None:
        self._cache = cache
        self._about_to_read = about_to_read
        self.topics: set[Topic] = set()
        self.requeue_seconds: float | None = None

    def requeue(self, seconds: float) -> None:
        """Build the snapshot again within this time."""
        known = self.requeue_seconds
        self.requeue_seconds = seconds if known is None else min(known, seconds)

    def subscribe(self, topic: Topic) -> None:
        """A topic is about to be read, here or elsewhere."""
        if topic not in self.topics:
            self.topics.add(topic)
            self._about_to_read(topic)

    def own(self, cls: type[K], namespace: str, name: str | None) -> K | None:
        """One of our objects; None if it does not exist or does not parse."""
        return None if name is None else _value(cls, self.state(cls.__name__, namespace, name))

    def all_own(self, cls: type[K], namespace: str, group: str = ANY) -> tuple[K, ...]:
        """Our objects of a kind, namespace and group that parse, by name."""
        values = (_value(cls, state) for state in self.members((cls.__name__, namespace, group)))
        return tuple(value for value in values if value is not None)

    def state(self, kind: str, namespace: str, name: str) -> State | None:
        """Any object that is stored."""
        self.subscribe((kind, namespace, name))
        return self._cache.state(kind, namespace, name)

    def members(self, topic: Topic) -> tuple[State, ...]:
        """The objects of a group, by name."""
        self.subscribe(topic)
        return self._cache.members(topic)
