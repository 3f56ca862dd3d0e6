"""What a run of a model's nodes takes, holds and costs when it is a fragment of its own. Pure.

Choosing cuts and making them both ask here, so what was planned is what is built. What a segment
takes and costs depends on its two ends alone, never on where the other cuts are:

- Its *own* nodes are those of `profile.nodes[start:end]` that are not CONSTANT.
- CONSTANT nodes that it needs are added, with the weights that they need.
- A tensor that a COMPUTE node before `start` makes is *taken* (sent).
- A tensor that a SHAPE node before `start` makes is made again if the tensors whose shapes it needs
  are taken anyway or made here; else it is taken.
- Outputs of the model that no node of its own makes (an input or a constant handed through) belong
  to the last segment.

Only what is given to others, and which SHAPE nodes turn out to be needed by nobody, depends on the
other segments: `Layout.pieces` settles that from the last to the first.

Memory is estimated as the agent runs a fragment: its weights, mapped from the disk (of a table of
which an item reads rows, the pages around those: the agent lets a fragment's mapped pages go when
the rows of many items have gathered there); the tensors taken, held for the whole run; the
runtime's arena (`arena`), replayed in the order of the nodes; the outputs once more, since they
leave the arena as copies, but for large ones of the last node that computes, for which the agent
has a place outside; and the runtime's own structures. Agents have a reserve for code. Fragments of
5 MiB and more took 0.65 to 1.10 of it (`tests/compiler/test_resident_estimate.py`). A tensor whose
size is unknown counts nothing, and makes `activation_bytes` None: then this is a lower bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final

from shoal_planner.arena import TABLE_BYTES, Arena, Tensors, arena_bytes, more_of_table_bytes
from shoal_planner.counting import Counting
from shoal_planner.half_forms import LOOP, Ran, half_names
from shoal_planner.halves import ForeseenTensors, HalfTensors
from shoal_planner.indexes import Index
from shoal_planner.pieces import Piece, Segment, just_in_time
from shoal_planner.profile import Role
from shoal_planner.steps import NODE_BYTES, Step, is_outside
from shoal_protocol.frame_sizes import frame_bytes, received_frame_bytes

FIXED_BYTES: Final = 7 << 18
"""A session's own need, up to half a MiB, and what starts of an agent and its messages differ by.
The code of kernels is no part of it: an agent has a reserve for that."""
LITTLE_BYTES: Final = 8 << 20
"""Inputs and arena: a fragment that works in so much needs no more than that besides."""
LARGER_BYTES: Final = 1 << 20
"""More is left where a fragment works in more than a little: its arena may be touched otherwise
than in the replay, and nodes take much at once."""
UNKNOWN_BYTES: Final = 3 << 20
"""The least estimate for activations of which any size is unknown."""
MOST_KNOWN: Final = 1024
"""So many segments of a layout are remembered."""


@dataclass(frozen=True)
class Layout(Index):
    """The segments of a profile."""

    def tensors(self, arena: Arena | None = None) -> Tensors | HalfTensors:
        """Nothing yet, in an arena that others use, too, or in one of its own."""
        if self.has_halves:
            return HalfTensors(self.profile, self._halves, arena)
        return Tensors(arena or Arena())

    def foreseen(self, start: int) -> Tensors | HalfTensors:
        """Nothing yet, of a segment that is asked for its cost again and again."""
        if self.has_halves:
            steps = self._all_steps
            return ForeseenTensors(self.profile, self._halves, foreseen=steps, start=start)
        return self.tensors()

    @cached_property
    def _halves(self) -> frozenset[str]:
        return half_names(self.profile)

    @cached_property
    def _all_steps(self) -> tuple[Ran, ...]:
        return tuple(Ran(each.node, each.made) for each in self.steps)

    def segment(self, start: int, end: int) -> Segment:
        """The fragment of `profile.nodes[start:end]`."""
        return self._segment(start, end)

    @cached_property
    def _segment(self) -> Callable[[int, int], Segment]:
        # Cuts that are compared have most of their fragments in common.
        return lru_cache(MOST_KNOWN)(
            lambda start, end: Growing(self, start, asked_once=True).grow_to(end).segment()
        )

    @cached_property
    def finest(self) -> tuple[tuple[int, int], ...]:
        """The pieces that no cut parts: where they start and end."""
        return tuple(pairwise((0, *self.legal, len(self.profile.nodes))))

    @cached_property
    def finest_needs(self) -> tuple[int, ...]:
        """The resident bytes of each of them."""
        return tuple(self.segment(start, end).resident_bytes for start, end in self.finest)

    def pieces(self, cuts: tuple[int, ...]) -> tuple[Piece, ...]:
        """The fragments that cuts make."""
        ends = zip((0, *cuts), (*cuts, len(self.profile.nodes)), strict=True)
        segments = [self.segment(start, end) for start, end in ends]
        needed = {each.name for each in self.profile.outputs}
        pieces: list[Piece] = []
        for segment in reversed(segments):
            piece = self._piece(segment, needed, last=not pieces)
            needed.update(piece.takes)
            pieces.append(piece)
        return tuple(reversed(pieces))

    def _piece(self, segment: Segment, needed: set[str], *, last: bool) -> Piece:
        nodes = self.profile.nodes
        made_here = {
            name
            for position in segment.nodes
            if position >= segment.start and nodes[position].role is not Role.CONSTANT
            for name in nodes[position].outputs
        }
        gives = (made_here & needed) | set(self.loose_outputs if last else ())
        reads, kept = set(gives), list[int]()
        for position in reversed(segment.nodes):
            if not reads.isdisjoint(nodes[position].outputs):
                kept.append(position)
                reads.update(nodes[position].inputs)
        kept.reverse()
        weights = dict.fromkeys(name for position in kept for name in nodes[position].weights)
        weights |= dict.fromkeys(sorted(gives & self.profile.weights.keys()))
        return Piece(
            segment=segment,
            nodes=just_in_time(self.profile, self.makers, kept),
            takes=tuple(sorted(reads & segment.takes)),
            gives=tuple(sorted(gives)),
            weights=tuple(weights),
        )


@dataclass(slots=True)
class Growing(Counting):
    """A segment whose cost is known at every step as well.

    A search can stop at the first that is too large. `outside_bytes` of the arena are not touched
    if the segment is a fragment that runs as a whole: what its last node gives lies outside. With
    halves, it counts a little more than it is found to need at the end, unless it is `asked_once`.
    """

    layout: Layout
    asked_once: bool = False
    outgoing_bytes: int = 0
    outside_bytes: int = 0
    _tensors: Tensors | HalfTensors = field(init=False)
    _outside: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        layout = self.layout
        self._tensors = layout.tensors() if self.asked_once else layout.foreseen(self.start)
        Counting.__post_init__(self)

    @property
    def activation_bytes(self) -> int:
        """What is taken, made and given, as far as sizes are known."""
        return self.incoming_bytes + self._inside_bytes + self.beside_bytes + self.outgoing_bytes

    @property
    def touched_bytes(self) -> int:
        """How far up the arena was touched, with all that was made in it."""
        return self._tensors.touched_bytes

    @property
    def _inside_bytes(self) -> int:
        """The same, where what is given has its place outside as far as an agent has one for it."""
        if isinstance(self._tensors, Tensors):
            return self.touched_bytes - self.outside_bytes
        held, known = self._tensors.held, self.layout.profile.tensors
        outside = (name for name in held if is_outside(known[name], self._axes))
        return self._tensors.touched(frozenset(outside))

    @property
    def beside_bytes(self) -> int:
        """The most that a node took beside it."""
        return self._tensors.beside_bytes

    @property
    def least_bytes(self) -> int:
        """The part of `resident_bytes` that only grows; of a segment that is asked again."""
        if isinstance(self._tensors, ForeseenTensors):
            least = self._tensors.least_touched_bytes
            return self._held_bytes(least, least)
        return self._held_bytes(self.touched_bytes, self._inside_bytes)

    @property
    def resident_bytes(self) -> int:
        """What a device must have."""
        given = self.outgoing_bytes + self.layout.moving * frame_bytes(self.outgoing_bytes)
        return self._held_bytes(self.touched_bytes, self._inside_bytes) + given

    def _held_bytes(self, touched: int, inside: int) -> int:
        """All but what is given; of an arena that is touched so far up, so much lies `inside`."""
        arena = max(arena_bytes(inside, self.beside_bytes), UNKNOWN_BYTES * self.unknown_sizes)
        fixed = FIXED_BYTES + NODE_BYTES * self.node_count
        fixed += LARGER_BYTES * (self.incoming_bytes + touched > LITTLE_BYTES)
        fixed += self.layout.moving * received_frame_bytes(self.incoming_bytes)
        resident = self.weight_bytes + self.incoming_bytes + arena + fixed
        more = more_of_table_bytes(resident) if touched > TABLE_BYTES else 0
        return resident + more + self.layout.frames_bytes

    def grow(self) -> None:
        """Add the next node."""
        position, self.end = self.end, self.end + 1
        node = self.layout.profile.nodes[position]
        if node.role is not Role.CONSTANT:
            self._take_inputs(position)
            step = self.layout.steps[position]
            if isinstance(self._tensors, Tensors):
                self._run_and_place(position, step, self._tensors)
            else:
                self._run(position, step.dying)
        self._take_loose_outputs()

    def _run_and_place(self, position: int, step: Step, tensors: Tensors) -> None:
        """What the node gives is outside if it is the last one that computes, and it is not known
        to stay in the arena."""
        without_bytes = None
        if step.axes_outside is not None and step.axes_outside <= self._axes:
            more = tensors.arena.most_bytes((*step.node.works_in, step.small_bytes))
            without_bytes = None if more is None else tensors.touched_bytes + more
        self._run(position, step.dying)
        # A node that only asks for shapes leaves the last one that computes the last.
        if step.node.role is Role.COMPUTE or not self._outside.isdisjoint(step.dying):
            self.outside_bytes, self._outside = 0, frozenset()
            if without_bytes is not None:
                self.outside_bytes = max(0, tensors.touched_bytes - without_bytes)
                self._outside = frozenset(step.node.outputs)

    def segment(self) -> Segment:
        """What has grown so far."""
        nodes = set(self._constants)
        nodes.update(
            position
            for position in range(self.start, self.end)
            if self.layout.profile.nodes[position].role is not Role.CONSTANT
        )
        sent = set()
        for name in self._shapes:
            chain = self._chain(name, available=self._takes)
            if chain is None:
                sent.add(name)
            else:
                nodes |= chain
        return Segment(
            start=self.start,
            end=self.end,
            nodes=tuple(sorted(nodes)),
            takes=frozenset(sent | self._takes),
            activation_bytes=None if self.unknown_sizes else self.activation_bytes,
            resident_bytes=self.resident_bytes,
            flops=None if self.unknown_flops else self.flops,
            incoming_bytes=self.incoming_bytes,
        )

    def _run(self, position: int, dying: Sequence[str] = ()) -> None:
        """Account for a node that runs here, after which nobody needs `dying`."""
        Counting._run(self, position)
        step = self.layout.steps[position]
        node = step.node
        for name in dying:
            if name in self._tensors.held and self.layout.makers.get(name, -1) >= self.start:
                self.outgoing_bytes -= self.layout.sent.get(name, 0)
        needed = self.layout.last_uses
        held = node.outputs if node.operator == LOOP else needed
        self._tensors.run(node, step.made, dying, held)
        if position >= self.start:
            self.outgoing_bytes += step.sent_bytes

    def _took(self, name: str) -> None:
        tensor = self.layout.profile.tensors[name]
        if (computed := tensor.computed_bytes or 0) > (tensor.bytes or 0):
            self._tensors.hold(name, computed)
