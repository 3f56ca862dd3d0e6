"""What an arena takes where there are tensors of half precision, in the forms that `half_forms`
tells. Pure.

What is to be can be told when the whole fragment is known. So nodes are noted, and replayed when
somebody asks.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal_planner.arena import Arena, Chunk, workspace_bytes
from shoal_planner.half_forms import ONE_NODE, SENT, SINGLE, Forms, Ran
from shoal_planner.pieces import CONSTANT_BYTES
from shoal_planner.profile import Halves, NodeProfile, Profile, Role

_NOBODY: Final = -1

Held = dict[str, tuple[Chunk, int]]


@dataclass(slots=True)
class _Replay:
    """Nodes that run one after the other. `outside` are tensors that are given, and do not lie in
    the arena."""

    forms: Forms
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
            if form == name + SINGLE:
                self._convert(at, name)
            elif form == name and name in self.forms.taken_single:
                self._narrow(name)
        ends = {
            form: self.held.pop(form)
            for _, form in self.forms.taken[at]
            if form in self.held and not self._is_wanted(form, at)
        }
        for name, size in ran.made:
            form = name + SINGLE if converts and self.forms.is_half(name) else name
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
        if (form := name + SINGLE) in self.held:
            return
        is_weight = self.forms.is_weight(name)
        size = 2 * self.forms.profile.weights[name] if is_weight else self._computed_bytes(name)
        self.held[form] = self.arena.allocate(size), size
        source = self.forms.form(name, single=False)
        if not self._is_wanted(source, at):
            self._release(source)

    def _narrow(self, name: str) -> None:
        """Make halves of what others gave in single precision, unless they are there."""
        if name not in self.held:
            size = self._computed_bytes(name) // 2
            self.held[name] = self.arena.allocate(size), size

    def _computed_bytes(self, name: str) -> int:
        return self.forms.profile.tensors[name].computed_bytes or 0

    def _make(self, node: NodeProfile, form: str, size: int, ends: Held) -> None:
        """What a node makes, in the place of something that ends, or in one of its own. What is
        given has its own."""
        if form in self.held or form in self.outside:
            return
        chunk, is_given = None, form in self.forms.given
        is_other = node.operator == ONE_NODE and node.halves is Halves.TAKEN
        if node.in_place and not is_given and not (is_other and form in self.forms.halves):
            found = next((each for each, (_, other) in ends.items() if other == size), None)
            chunk = None if found is None else ends.pop(found)[0]
        if chunk is None:
            chunk = self.arena.allocate(size)
        name = form.removesuffix(SINGLE)
        if form in self.forms.lasts or name in self.forms.lasts or name in self.forms.given_single:
            self.held[form] = chunk, size
        else:
            self.arena.release(chunk)

    def _give_back(self, at: int, name: str, computed: int) -> None:
        """Make halves of what a node gave in single precision, if somebody wants them; and the copy
        that is given in single precision."""
        if not self.forms.is_half(name):
            return
        is_sent, is_outside = name in self.forms.given_single, name in self.outside
        if is_sent and not is_outside and name not in self.forms.passed_on:
            self.held[name + SENT] = self.arena.allocate(computed), computed
        if name in self.forms.lasts and name not in self.held and (is_sent or not is_outside):
            self.held[name] = self.arena.allocate(computed // 2), computed // 2
        if not self._is_wanted(name + SINGLE, at):
            self._release(name + SINGLE)

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
        names = {source: name for name, source in replay.forms.passed_on.items()}
        return {
            names.get(form, form.removesuffix(SENT)): each for form, each in replay.held.items()
        }

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
        forms = Forms(self.profile, self.halves, ran, given)
        passed_on = {source for name, source in forms.passed_on.items() if name in outside}
        replay = _Replay(forms, arena, passed_on.union(outside))
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
        forms = Forms(self.profile, self.halves, self.foreseen, given, self.start)
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
        if name in forms.same or self.profile.tensors[name].sent_single:
            return self._sum(made)
        if at not in forms.converts or not forms.is_half(name):
            return 0
        node = self.foreseen[at].node
        again = filter(forms.is_half, node.inputs if node.halves is Halves.TAKEN else ())
        return self._sum((*made, *again))

    def _sum(self, names: Iterable[str]) -> int:
        return sum(self.profile.tensors[each].bytes or 0 for each in names)


def _is_variable(ran: Ran) -> bool:
    return ran.node.role is not Role.CONSTANT
