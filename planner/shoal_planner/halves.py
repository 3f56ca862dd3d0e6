"""What an arena takes where there are tensors of half precision. Pure.

ONNX Runtime has few kernels for float16 on processors. A node without one is CONVERTED: what it
takes is made single precision before, and what it gives is made halves again after, where somebody
wants it so. A node that has one takes halves as they are, unless it stands alone among nodes that
are converted: then it is, too (`InsertCastTransformer` with its `IsIsolatedFp16NodeOnCpu`, in ONNX
Runtime 1.31). So a tensor may be there as halves, as numbers of single precision, or as both, each
from when it is made until nobody wants it any more:

- What is taken from others comes as halves, and so do weights; they are outside of the arena.
- What is given to others are halves, whoever makes it. So what a node does depends on where the
  fragment ends: one that gives something away is never alone among others.
- A conversion that the model has itself costs nothing where the other form is there anyway.

What is to be can be told when the whole fragment is known. So nodes are noted, and replayed when
somebody asks.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

from shoal_planner.arena import Arena, Chunk, workspace_bytes
from shoal_planner.pieces import CONSTANT_BYTES
from shoal_planner.profile import HALF, Halves, NodeProfile, Profile, Role

_SINGLE: Final = "\0"
"""Behind a name: that tensor in single precision. No name of a model has it."""
_FOREVER: Final = 1 << 60
_NOBODY: Final = -1
LOOP: Final = "Loop"
"""The runtime keeps what a loop has handed on, also where nobody needs it: measured."""

Held = dict[str, tuple[Chunk, int]]


class Ran(NamedTuple):
    """A node that ran, and what it made: names with bytes, halves counted as single precision."""

    node: NodeProfile
    made: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Forms:
    """In which form nodes take and make tensors, if they run together and so much is `given`."""

    profile: Profile
    halves: frozenset[str]
    ran: Sequence[Ran]
    given: frozenset[str]
    start: int = 0
    """What is before does not run, but for what depends on no input."""

    @cached_property
    def running(self) -> Sequence[int]:
        before = (at for at in range(self.start) if _is_constant(self.ran[at]))
        return (*before, *range(self.start, len(self.ran)))

    @cached_property
    def makers(self) -> Mapping[str, int]:
        return {name: at for at in self.running for name in self.ran[at].node.outputs}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[NodeProfile]]:
        found: dict[str, list[NodeProfile]] = {}
        for at in self.running:
            for name in self.ran[at].node.inputs:
                found.setdefault(name, []).append(self.ran[at].node)
        return found

    @cached_property
    def converts(self) -> frozenset[int]:
        """The nodes that compute in single precision in place of halves."""
        return frozenset(
            at
            for at in self.running
            if (node := self.ran[at].node).halves is Halves.CONVERTED
            or (node.halves is Halves.TAKEN and self._is_alone(node))
        )

    def _is_alone(self, node: NodeProfile) -> bool:
        if not self.given.isdisjoint(node.outputs) or self.makers.keys().isdisjoint(node.inputs):
            return False
        looked_at = {name for name in node.neighbours if self.is_half(name)}
        makers = [self.makers.get(name) for name in looked_at.intersection(node.inputs)]
        around = [self.ran[at].node for at in makers if at is not None]
        made = looked_at.intersection(node.outputs)
        around += [reader for name in made for reader in self.readers.get(name, ())]
        return bool(made) and all(each.halves is Halves.CONVERTED for each in around)

    def is_half(self, name: str) -> bool:
        return name in self.halves

    def is_weight(self, name: str) -> bool:
        return name in self.profile.half_weights

    @cached_property
    def same(self) -> Mapping[str, str]:
        """Of forms that are another one, which: what views show, what conversions of the model make
        or are made of. What is given is always by itself."""
        found: dict[str, str] = {}
        for at in self.running:
            node = self.ran[at].node
            source, name = next(iter((*node.inputs, *node.weights)), ""), node.outputs[0]
            forms = self._pair(at, source, name)
            if forms is not None and forms[0] not in self.given:
                found[forms[0]] = found.get(forms[1], forms[1])
        return found

    def _pair(self, at: int, source: str, name: str) -> tuple[str, str] | None:
        """A form that a node makes, and that of what it takes which is the same."""
        node = self.ran[at].node
        if node.is_view:
            end = _SINGLE if at in self.converts else ""
            return name + end, source + end
        if node.halves is Halves.NARROWED and not self._is_rounded(name):
            maker = self.makers.get(source)
            widened = None if maker is None else self.ran[maker].node
            if widened is not None and widened.halves is Halves.WIDENED:
                return name, next(iter((*widened.inputs, *widened.weights)))
            return name + _SINGLE, source
        if node.halves is Halves.WIDENED and self._is_computed_single(source):
            return name, source + _SINGLE
        return None

    def _is_rounded(self, name: str) -> bool:
        """Whether the model itself makes single precision of it again, which is not left out."""
        return any(each.halves is Halves.WIDENED for each in self.readers.get(name, ()))

    def is_made_single(self, name: str) -> bool:
        """Whether it is there in single precision before anybody wants it so."""
        return name + _SINGLE in self.same or self._is_computed_single(name)

    def _is_computed_single(self, name: str) -> bool:
        maker = self.makers.get(name)
        return maker is not None and maker in self.converts

    def form(self, name: str, *, single: bool) -> str:
        """A tensor as one takes it that wants it in single precision, or as it is."""
        asked = name + _SINGLE if single else name
        return self.same.get(asked, asked)

    def wants_single(self, at: int, name: str) -> bool:
        """Whether the node takes it in single precision in place of halves."""
        if self.ran[at].node.halves is Halves.WIDENED:
            return self._is_computed_single(name)
        return at in self.converts and self.is_half(name)

    @cached_property
    def taken(self) -> Mapping[int, Sequence[tuple[str, str]]]:
        """What each node takes: names, and in which form."""
        return {at: tuple(self._taken(at)) for at in self.running}

    def _taken(self, at: int) -> Iterator[tuple[str, str]]:
        node = self.ran[at].node
        for name in (*node.inputs, *filter(self.is_weight, node.weights)):
            yield name, self.form(name, single=self.wants_single(at, name))

    @cached_property
    def lasts(self) -> Mapping[str, int]:
        """The last node that wants each form. Halves are wanted, too, by the first that wants them
        made single precision."""
        found: dict[str, int] = {}
        for at in self.running:
            for name, form in self.taken[at]:
                if form not in found and form == name + _SINGLE and not self.is_made_single(name):
                    found[self.form(name, single=False)] = at
                found[form] = at
        nodes = (self.ran[at].node for at in self.running)
        kept = (node.outputs for node in nodes if node.operator == LOOP)
        return found | dict.fromkeys((*self.given, *chain.from_iterable(kept)), _FOREVER)


@dataclass(slots=True)
class _Replay:
    """Nodes that run one after the other. `outside` are tensors that are given, and do not lie in
    the arena."""

    forms: _Forms
    arena: Arena
    outside: Collection[str] = ()
    alone_bytes: int = 0
    held: Held = field(default_factory=dict)

    @property
    def touched_bytes(self) -> int:
        return max(self.arena.total_bytes, self.alone_bytes)

    def convert_weights(self) -> None:
        for at, ran in enumerate(self.forms.ran):
            for name in filter(self.forms.is_weight, ran.node.weights):
                if self.forms.wants_single(at, name):
                    self._convert(at, name)

    def run(self, at: int) -> None:
        ran, converts = self.forms.ran[at], at in self.forms.converts
        for name, form in self.forms.taken[at]:
            if form == name + _SINGLE:
                self._convert(at, name)
        ends = {
            form: self.held.pop(form)
            for _, form in self.forms.taken[at]
            if form in self.held and not self._is_wanted(form, at)
        }
        for name, size in ran.made:
            form = name + _SINGLE if converts and self.forms.is_half(name) else name
            if ran.node.halves is not Halves.NARROWED and form not in self.forms.same:
                self._make(ran.node, form, self._bytes(form, size), ends)
        for chunk in [self.arena.allocate(size) for size in ran.node.workspaces]:
            self.arena.release(chunk)
        needed = ran.node.works_in if converts else ran.node.workspaces
        self.alone_bytes = max(self.alone_bytes, workspace_bytes(needed))
        for chunk, _ in ends.values():
            self.arena.release(chunk)
        for name, size in ran.made:
            if converts or ran.node.halves is Halves.NARROWED:
                self._give_back(at, name, size)

    def _bytes(self, form: str, computed: int) -> int:
        return computed // 2 if self.forms.is_half(form) else computed

    def _is_wanted(self, form: str, at: int) -> bool:
        return self.forms.lasts.get(form, _NOBODY) > at

    def _convert(self, at: int, name: str) -> None:
        """Make single precision of halves, unless that is there."""
        if (form := name + _SINGLE) in self.held:
            return
        profile = self.forms.profile
        size = profile.weights[name] if self.forms.is_weight(name) else profile.tensors[name].bytes
        self.held[form] = self.arena.allocate(2 * (size or 0)), 2 * (size or 0)
        source = self.forms.form(name, single=False)
        if not self._is_wanted(source, at):
            self._release(source)

    def _make(self, node: NodeProfile, form: str, size: int, ends: Held) -> None:
        """What a node makes, in the place of something that ends, or in one of its own. What is
        given has its own."""
        if form in self.held or form in self.outside:
            return
        chunk, is_given = None, form in self.forms.given
        if node.in_place and not is_given:
            found = next((each for each, (_, other) in ends.items() if other == size), None)
            chunk = None if found is None else ends.pop(found)[0]
        if chunk is None:
            chunk = self.arena.allocate(size)
        name = form.removesuffix(_SINGLE)
        if form in self.forms.lasts or name in self.forms.lasts:
            self.held[form] = chunk, size
        else:
            self.arena.release(chunk)

    def _give_back(self, at: int, name: str, computed: int) -> None:
        """Make halves of what a node gave in single precision, if somebody wants them."""
        if not self.forms.is_half(name):
            return
        if name in self.forms.lasts and name not in self.held and name not in self.outside:
            self.held[name] = self.arena.allocate(computed // 2), computed // 2
        if not self._is_wanted(name + _SINGLE, at):
            self._release(name + _SINGLE)

    def _release(self, form: str) -> None:
        if form in self.held:
            self.arena.release(self.held.pop(form)[0])


@dataclass(slots=True)
class HalfTensors:
    """As `arena.Tensors`, for a profile with halves: what nodes make and let go. In an `arena` that
    others use as well they are replayed once, by `settled`."""

    profile: Profile
    halves: frozenset[str]
    """The names of all tensors and weights of half precision."""
    arena: Arena | None = None
    beside_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)
    _ran: list[Ran] = field(default_factory=list)
    _constant: set[str] = field(default_factory=set)
    _constant_bytes: int = 0
    _known: dict[Collection[str], int] = field(default_factory=dict)

    def run(
        self,
        node: NodeProfile,
        made: Iterable[tuple[str, int]],
        dying: Iterable[str],
        needed: Container[str],
    ) -> None:
        """A node runs that makes tensors of so many bytes, halves counted as single precision, and
        is the last to need `dying`."""
        ran = Ran(node, tuple(made))
        self._ran.append(ran)
        self._known.clear()
        for name in dying:
            self.held.pop(name, None)
        self.held |= {name: size for name, size in ran.made if name in needed}
        self.beside_bytes = max(self.beside_bytes, node.beside_bytes)
        if node.role is Role.CONSTANT:
            self._constant.update(node.outputs)
            self._constant_bytes += sum(size for _, size in ran.made)

    def hold(self, name: str, size: int) -> None:
        """A tensor is taken that no node here makes: it is made single precision when a node wants
        it so."""

    @property
    def touched_bytes(self) -> int:
        """How far up an arena is touched by what has run, if all that is held is given."""
        return self.touched(frozenset())

    def touched(self, outside: frozenset[str]) -> int:
        """The same, where some of what is given has a place outside of the arena."""
        if outside not in self._known:
            replay = self._replay(Arena(), outside)
            self._known[outside] = replay.touched_bytes
        return self._known[outside]

    def settled(self) -> Held:
        """What is left in the arena that others use as well."""
        assert self.arena is not None
        replay = self._replay(self.arena, frozenset())
        self._known[frozenset()] = replay.touched_bytes
        return replay.held

    @property
    def _given(self) -> Iterator[str]:
        return (name for name in self.held if name not in self._constant)

    @property
    def _at_once(self) -> bool:
        """Whether there is so much that depends on no input that the runtime has an order of its
        own (`Piece.in_order`), in which all of that comes first."""
        return self._constant_bytes > CONSTANT_BYTES

    def _replay(self, arena: Arena, outside: Collection[str]) -> _Replay:
        ran = sorted(self._ran, key=_is_variable) if self._at_once else self._ran
        given = frozenset(self._given)
        replay = _Replay(_Forms(self.profile, self.halves, ran, given), arena, outside)
        if self._at_once:
            replay.convert_weights()
        for at in range(len(ran)):
            replay.run(at)
        return replay


@dataclass(slots=True)
class ForeseenTensors(HalfTensors):
    """The same while a search adds node after node of a profile, all of whose nodes are `foreseen`:
    as much as `HalfTensors` comes to, or more. Each node is replayed as if the fragment went on to
    the end of the model; what it takes that it ends is added."""

    foreseen: Sequence[Ran] = ()
    start: int = 0
    _positions: Mapping[str, int] = field(default_factory=dict)
    _interior: _Replay = field(init=False)
    _converted_bytes: int = 0
    _endings: dict[tuple[str, bool], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = frozenset(each.name for each in self.profile.outputs)
        forms = _Forms(self.profile, self.halves, self.foreseen, given, self.start)
        self._positions = {self.foreseen[at].node.label: at for at in forms.running}
        self._interior = _Replay(forms, Arena())

    def run(
        self,
        node: NodeProfile,
        made: Iterable[tuple[str, int]],
        dying: Iterable[str],
        needed: Container[str],
    ) -> None:
        HalfTensors.run(self, node, made, dying, needed)
        self._ran.clear()
        self._converted_bytes += sum(node.converted)
        if (at := self._positions.get(node.label)) is not None:
            self._interior.run(at)

    @property
    def least_touched_bytes(self) -> int:
        """The part of it that only grows: what ends is added to it."""
        return self._touched_beside(0)

    def touched(self, outside: frozenset[str]) -> int:
        given, known = [(name, name in outside) for name in self._given], self._endings
        known |= {each: self._ending_bytes(*each) for each in given if each not in known}
        return self._touched_beside(sum(map(known.__getitem__, given)))

    def _touched_beside(self, ended: int) -> int:
        at_once = self._at_once * (self._constant_bytes + self._converted_bytes)
        more, touched = ended + at_once, self._interior.touched_bytes
        return touched + more if touched else workspace_bytes((more,) if more else ())

    def _ending_bytes(self, name: str, outside: bool) -> int:
        """What is made of a tensor where it is given, if its node makes single precision of it, or
        something that is there anyway; and of what that takes, if it is alone only as long as it
        gives nothing."""
        forms = self._interior.forms
        at, made = forms.makers.get(name, _NOBODY), [] if outside else [name]
        if name in forms.same:
            return self._sum(made)
        if at not in forms.converts or not forms.is_half(name):
            return 0
        node = self.foreseen[at].node
        again = filter(forms.is_half, node.inputs if node.halves is Halves.TAKEN else ())
        return self._sum((*made, *again))

    def _sum(self, names: Iterable[str]) -> int:
        return sum(self.profile.tensors[each].bytes or 0 for each in names)


def _is_constant(ran: Ran) -> bool:
    return ran.node.role is Role.CONSTANT


def _is_variable(ran: Ran) -> bool:
    return not _is_constant(ran)


def half_names(profile: Profile) -> frozenset[str]:
    """The names of all tensors and weights of half precision."""
    tensors = {name for name, each in profile.tensors.items() if each.spec.dtype == HALF}
    return profile.half_weights | tensors


def converted_tables(profile: Profile) -> frozenset[int]:
    """Positions of nodes that may compute with a table in single precision: all of it is read then,
    where rows would be otherwise. What they read it by is made by a node, so that they may stand
    alone among others."""
    if not profile.half_weights:
        return frozenset()
    made = {name for node in profile.nodes for name in node.outputs}
    kept = {
        name
        for node in profile.nodes
        if node.halves is not Halves.CONVERTED
        for name in node.inputs
    }
    return frozenset(
        position
        for position, node in enumerate(profile.nodes)
        if node.halves is Halves.TAKEN
        and not profile.half_weights.isdisjoint(node.weights)
        and not made.isdisjoint(node.inputs)
        and kept.isdisjoint(node.outputs)
    )
