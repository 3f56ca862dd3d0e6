"""In which forms tensors of half precision are there, where nodes run together. Pure.

ONNX Runtime has few kernels for float16 on processors. A node without one is CONVERTED: what it
takes is made single precision before, and what it gives is made halves again after, where somebody
wants it so. A node that has one takes halves as they are, unless it stands alone among nodes that
are converted: then it is, too (`InsertCastTransformer` with its `IsIsolatedFp16NodeOnCpu`, in ONNX
Runtime 1.31). So a tensor may be there as halves, as numbers of single precision, or as both, each
from when it is made until nobody wants it any more:

- What is taken from others comes as halves, and so do weights; they are outside of the arena.
- What is given to others are halves, whoever makes it. So what a node does depends on where the
  fragment ends: one that gives something away is never alone among others.
- What the whole model keeps in single precision is taken and given so (`kept_single`), or results
  would be others than the whole model's: it is rounded nowhere. It is given as a copy.
- A conversion that the model has itself costs nothing where the other form is there anyway.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

from shoal_planner.profile import Halves, NodeProfile, Profile, Role

SINGLE: Final = "\0"
"""Behind a name: that tensor in single precision. No name of a model has it."""
SENT: Final = "\1"
"""Behind a name: the same, as it comes from others or is given to them."""
LOOP: Final = "Loop"
"""The runtime keeps what a loop has handed on, also where nobody needs it: measured."""
ONE_NODE: Final = "Relu"
"""Of the operators that are made of others, where halves are: it is a `Max`, and not in place."""
_FOREVER: Final = 1 << 60


class Ran(NamedTuple):
    """A node that ran, and what it made: names with bytes, halves counted as single precision."""

    node: NodeProfile
    made: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Forms:
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
            if (node := self.ran[at].node).halves.is_converted
            or (node.halves is Halves.TAKEN and self._is_alone(node))
        )

    def _is_alone(self, node: NodeProfile) -> bool:
        if not self.given.isdisjoint(node.outputs) or self.makers.keys().isdisjoint(node.inputs):
            return False
        looked_at = {name for name in node.neighbours if self.is_half(name)}
        makers = [self.makers.get(name) for name in looked_at.intersection(node.inputs)]
        before = [self.ran[at].node.halves for at in makers if at is not None]
        made = looked_at.intersection(node.outputs)
        after = [reader.halves for name in made for reader in self.readers.get(name, ())]
        alone = all(each is Halves.CONVERTED for each in before)
        return alone and bool(made) and all(each.is_converted for each in after)

    @cached_property
    def taken_single(self) -> frozenset[str]:
        """What comes from others in single precision."""
        return self._sent_single(self.readers.keys() - self.makers.keys())

    @cached_property
    def given_single(self) -> frozenset[str]:
        """What is given to others in single precision."""
        return self._sent_single(self.makers.keys() & self.given)

    @cached_property
    def passed_on(self) -> Mapping[str, str]:
        """Of what is given in single precision, what is no copy: a conversion of the model would
        have made halves of what nobody else reads. With what it is of."""
        nodes = (self.ran[self.makers[name]].node for name in self.given_single)
        return {
            node.outputs[0]: source
            for node in nodes
            if node.halves is Halves.NARROWED
            for source in node.inputs
            if source in self.makers and source not in self.given and source not in self.same
            if len(self.readers[source]) == 1
        }

    def _sent_single(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in names if self.profile.tensors[name].sent_single)

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
            if at in self.converts:
                return name + SINGLE, self._single(source)
            return name, source
        if node.halves is Halves.NARROWED and not self._is_rounded(name):
            maker = self.makers.get(source)
            widened = None if maker is None else self.ran[maker].node
            if widened is not None and widened.halves is Halves.WIDENED:
                return name, next(iter((*widened.inputs, *widened.weights)))
            return name + SINGLE, source
        if node.halves is Halves.WIDENED and self._is_there_single(source):
            return name, self._single(source)
        return None

    def _single(self, name: str) -> str:
        return name + (SENT if name in self.taken_single else SINGLE)

    def _is_rounded(self, name: str) -> bool:
        """Whether the model itself makes single precision of it again, which is not left out."""
        return any(each.halves is Halves.WIDENED for each in self.readers.get(name, ()))

    def is_made_single(self, name: str) -> bool:
        """Whether it is there in single precision before anybody wants it so."""
        return name + SINGLE in self.same or self._is_there_single(name)

    def _is_there_single(self, name: str) -> bool:
        maker = self.makers.get(name)
        if maker is None or maker not in self.converts:
            return name in self.taken_single
        return self.ran[maker].node.halves is not Halves.ROUNDED

    def form(self, name: str, *, single: bool) -> str:
        """A tensor as one takes it that wants it in single precision, or as it is."""
        asked = self._single(name) if single else name
        return self.same.get(asked, asked)

    def wants_single(self, at: int, name: str) -> bool:
        """Whether the node takes it in single precision in place of halves."""
        if self.ran[at].node.halves is Halves.WIDENED:
            return self._is_there_single(name)
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
                if form not in found and form == name + SINGLE and not self.is_made_single(name):
                    found[self.form(name, single=False)] = at
                found[form] = at
        nodes = (self.ran[at].node for at in self.running)
        kept = (node.outputs for node in nodes if node.operator == LOOP)
        given = (
            self.passed_on.get(name, name + SENT if name in self.given_single else name)
            for name in self.given
        )
        return found | dict.fromkeys((*given, *chain.from_iterable(kept)), _FOREVER)


def _is_constant(ran: Ran) -> bool:
    return ran.node.role is Role.CONSTANT


def half_names(profile: Profile) -> frozenset[str]:
    """The names of all tensors and weights of half precision."""
    return profile.half_weights | {name for name, each in profile.tensors.items() if each.is_half}


def converted_alone(profile: Profile) -> frozenset[int]:
    """Positions of nodes that have a kernel for halves, and are converted in the whole model."""
    nodes, converts = profile.nodes, _whole(profile).converts
    return frozenset(
        at for at in converts if nodes[at].halves is Halves.TAKEN and nodes[at].role is Role.COMPUTE
    )


def widened_from_halves(profile: Profile) -> frozenset[int]:
    """Positions of conversions to single precision that take the halves in any case: they give
    outputs of the model, and the halves are there for others."""
    forms = _whole(profile)
    return frozenset(
        at
        for at in forms.running
        if (node := profile.nodes[at]).halves is Halves.WIDENED
        and not forms.given.isdisjoint(node.outputs)
        and any(name in forms.lasts and forms.wants_single(at, name) for name in node.inputs)
    )


def kept_single(profile: Profile) -> frozenset[str]:
    """Tensors of half precision that the runtime keeps in single precision in the whole model: from
    a node that computes so, in every fragment, to one that does."""
    forms = _whole(profile)
    wanted = {
        name
        for at in forms.running
        for name in profile.nodes[at].inputs
        if name not in forms.given and forms.wants_single(at, name) and forms.is_made_single(name)
    }
    return frozenset(
        name
        for node in profile.nodes
        if node.role is Role.COMPUTE
        and (node.halves.is_converted or node.halves is Halves.NARROWED)
        for name in node.outputs
        if name in wanted
    )


def _whole(profile: Profile) -> Forms:
    given = frozenset(each.name for each in profile.outputs)
    return Forms(profile, half_names(profile), [Ran(each, ()) for each in profile.nodes], given)


def converted_tables(profile: Profile) -> frozenset[int]:
    """Positions of nodes that may compute with a table in single precision: all of it is read then,
    where rows would be otherwise. What they read it by is made by a node, so that they may stand
    alone among others."""
    if not profile.half_weights:
        return frozenset()
    made = {name for node in profile.nodes for name in node.outputs}
    kept = {name for node in profile.nodes if not node.halves.is_converted for name in node.inputs}
    return frozenset(
        position
        for position, node in enumerate(profile.nodes)
        if node.halves is Halves.TAKEN
        and not profile.half_weights.isdisjoint(node.weights)
        and not made.isdisjoint(node.inputs)
        and kept.isdisjoint(node.outputs)
    )
