"""What a segment holds and takes, counted while it grows, without the arena that it works in. Pure.

That is all that a search for a number of fragments asks for, and replaying the arena takes most of
the time that a segment takes to grow (`segments.Growing`).
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final, Self

from shoal_planner.indexes import Index
from shoal_planner.profile import Role
from shoal_planner.steps import symbols

_WHOLE: Final[Mapping[str, int]] = {}


@dataclass(slots=True)
class Counting:
    """A segment that grows by one node at a time. All that is stored only ever grows.

    `weight_bytes` counts of each weight what is read of it; `inside_bytes` are those of them that
    are in the model itself.
    """

    layout: Index
    start: int
    end: int = field(init=False)
    weight_bytes: int = 0
    inside_bytes: int = 0
    incoming_bytes: int = 0
    flops: int = 0
    node_count: int = 0
    unknown_sizes: bool = False
    unknown_flops: bool = False
    _weights: dict[str, int] = field(default_factory=dict)
    _takes: set[str] = field(default_factory=set)
    _axes: set[str] = field(default_factory=set)
    _shapes: set[str] = field(default_factory=set)
    _constants: set[int] = field(default_factory=set)
    _again: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.end = self.start
        self._take_loose_outputs()

    def grow_to(self, end: int) -> Self:
        """Add the nodes before a position."""
        while self.end < end:
            self.grow()
        return self

    def grow(self) -> None:
        """Add the next node."""
        position, self.end = self.end, self.end + 1
        node = self.layout.profile.nodes[position]
        if node.role is not Role.CONSTANT:
            self._take_inputs(position)
            self._run(position)
        self._take_loose_outputs()

    def _take_inputs(self, position: int) -> None:
        if self.layout.first_makers[position] < self.start:
            for name in self.layout.profile.nodes[position].inputs:
                self._need(name)

    def _take_loose_outputs(self) -> None:
        if self.end == len(self.layout.profile.nodes):
            for name in self.layout.loose_outputs:
                self._need(name)

    def _need(self, name: str) -> None:
        """A tensor that a node reads: made here already, made again, or taken."""
        profile = self.layout.profile
        maker = self.layout.makers.get(name)
        if maker is None and name in profile.weights:
            self._hold((name,))
        elif maker is not None and profile.nodes[maker].role is Role.CONSTANT:
            self._constant(maker)
        elif maker is not None and maker >= self.start:
            return
        elif maker is not None and profile.nodes[maker].role is Role.SHAPE:
            if name not in self._shapes:
                self._shapes.add(name)
                self.incoming_bytes += self._size(name)
                # Whether it is sent or made again is known at the end: count both.
                for position in self._made_again(name):
                    self._run(position)
        elif name not in self._takes:
            self._takes.add(name)
            self._axes |= symbols(profile.tensors[name].spec)
            self.incoming_bytes += self._size(name)
            self._took(name)

    def _made_again(self, name: str) -> set[int]:
        """The nodes before `start` that make a SHAPE tensor, but for those that other tensors need
        as well, and that were given before."""
        chain = self._chain(name, available=None, known=self._again)
        assert chain is not None, "everything is available"
        self._again |= chain
        return chain

    def _constant(self, position: int) -> None:
        waiting = [position]
        while waiting:
            position = waiting.pop()
            if position in self._constants:
                continue
            self._constants.add(position)
            node = self.layout.profile.nodes[position]
            waiting.extend(self.layout.makers[name] for name in node.inputs)
            self._run(position)

    def _run(self, position: int) -> None:
        """Account for a node that runs here."""
        step = self.layout.steps[position]
        node = step.node
        self.node_count += step.runtime_nodes
        self.unknown_sizes |= step.unknown
        if node.weights:
            self._hold(node.weights, step.touched)
        self.unknown_flops |= node.flops is None
        self.flops += node.flops or 0

    def _hold(self, weights: tuple[str, ...], touched: Mapping[str, int] = _WHOLE) -> None:
        """Count weights, whole but for those of which so many bytes more are `touched`."""
        for name in weights:
            held = self._weights.get(name, 0)
            whole = self.layout.profile.weights[name]
            size = min(whole, held + touched.get(name, whole))
            if size > held:
                self._weights[name] = size
                self.weight_bytes += size - held
                if name in self.layout.inside:
                    self.inside_bytes += size - held

    def _took(self, name: str) -> None:
        """A tensor is taken that a node before has made."""

    def _size(self, name: str) -> int:
        size = self.layout.profile.tensors[name].bytes
        self.unknown_sizes |= size is None
        return size or 0

    def _chain(
        self, name: str, available: Set[str] | None, known: Set[int] = frozenset()
    ) -> set[int] | None:
        """The nodes before `start` that make a SHAPE tensor again, given what is available, and
        what `known` ones make.

        None: something is not available. With `available` None everything is. The CONSTANT nodes
        that they need are added here and now.
        """
        chain: set[int] = set()
        waiting = [name]
        while waiting:
            needed = waiting.pop()
            maker = self.layout.makers.get(needed)
            role = None if maker is None else self.layout.profile.nodes[maker].role
            if maker is not None and role is Role.CONSTANT:
                self._constant(maker)
            elif maker is not None and maker >= self.start:
                continue
            elif maker is None or role is not Role.SHAPE:
                if available is not None and needed not in available:
                    return None
            elif maker not in chain and maker not in known:
                chain.add(maker)
                waiting.extend(self.layout.profile.nodes[maker].inputs)
        return chain
