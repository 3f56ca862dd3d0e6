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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from shoal_planner.arena import TABLE_BYTES, Arena, Tensors, arena_bytes, more_of_table_bytes
from shoal_planner.half_forms import LOOP, Ran, half_names
from shoal_planner.halves import ForeseenTensors, HalfTensors
from shoal_planner.pieces import Piece, Segment, blocked_positions, just_in_time
from shoal_planner.profile import Halves, Profile, Role
from shoal_planner.steps import NODE_BYTES, Step, is_outside, steps_of, symbols
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
_WHOLE: Final[Mapping[str, int]] = {}


@dataclass(frozen=True)
class Layout:
    """A profile with indexes of it, computed once. `inside` are weights in the model itself, not
    mapped from a file. `moving`: memory includes frames that carry other items in and out meanwhile
    (`frames_bytes`: those of the model). Rows of tables count for `row_items`: the item before has
    left its own. In blocks, devices read some themselves, which are `gathered`: of inputs that are
    `rows`, so many bytes count from the first node that takes them to the last.
    Outputs that are `leaving` are out of the arena as soon as they are made."""

    profile: Profile
    inside: frozenset[str] = frozenset()
    moving: bool = False
    frames_bytes: int = 0
    row_items: int = 2
    gathered: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The position of the node that makes each tensor."""
        return {
            name: position
            for position, node in enumerate(self.profile.nodes)
            for name in node.outputs
        }

    @cached_property
    def last_uses(self) -> Mapping[str, int]:
        """The position of the last node that reads each tensor; outputs of the model: the end."""
        nodes = self.profile.nodes
        last = {name: position for position, node in enumerate(nodes) for name in node.inputs}
        results = (each.name for each in self.profile.outputs if each.name not in self.leaving)
        return last | dict.fromkeys(results, len(nodes))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """For each position, what running its node comes to."""
        uses, sent, items = self.last_uses, self.sent, self.row_items
        return steps_of(self.profile, uses, sent, items, gathered=self.gathered)

    @cached_property
    def has_halves(self) -> bool:
        """Whether a node takes something of half precision."""
        return any(each.halves is not Halves.NONE for each in self.profile.nodes)

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

    @cached_property
    def sent(self) -> Mapping[str, int]:
        """Bytes of each tensor that a node makes and that can be sent."""
        return {
            name: self.profile.tensors[name].bytes or 0
            for name, maker in self.makers.items()
            if self.profile.nodes[maker].role is not Role.CONSTANT
        }

    @cached_property
    def loose_outputs(self) -> tuple[str, ...]:
        """Outputs of the model that no COMPUTE or SHAPE node makes."""
        return tuple(
            each.name
            for each in self.profile.outputs
            if (maker := self.makers.get(each.name)) is None
            or self.profile.nodes[maker].role is Role.CONSTANT
        )

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where a cut makes sense: before a COMPUTE node that is not the first, and is not joined
        to the one before it."""
        compute = [
            position
            for position, node in enumerate(self.profile.nodes)
            if node.role is Role.COMPUTE
        ]
        return tuple(each for each in compute[1:] if not self.profile.nodes[each].joined)

    @cached_property
    def obstacles(self) -> Mapping[int, str]:
        """Of those, the ones where a cut cannot be: some tensor that crosses cannot be sent."""
        blocked = blocked_positions(self.profile, self.makers, self.last_uses)
        return {position: blocked[position] for position in self.positions if position in blocked}

    @cached_property
    def legal(self) -> tuple[int, ...]:
        """Where a cut can be."""
        return tuple(each for each in self.positions if each not in self.obstacles)

    def segment(self, start: int, end: int) -> Segment:
        """The fragment of `profile.nodes[start:end]`."""
        growing = Growing(self, start, asked_once=True)
        while growing.end < end:
            growing.grow()
        return growing.segment()

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
class Growing:
    """A segment that grows by one node at a time; its cost is known at every step.

    All that is stored only ever grows, so a search can stop at the first that is too large.
    `weight_bytes` counts of each weight what is read of it; `inside_bytes` are those of them that
    are in the model itself. `outside_bytes` of the arena are not touched if the segment is a
    fragment that runs as a whole: what its last node gives lies outside. With halves, it counts a
    little more than it is found to need at the end, unless it is `asked_once`.
    """

    layout: Layout
    start: int
    asked_once: bool = False
    end: int = field(init=False)
    weight_bytes: int = 0
    inside_bytes: int = 0
    incoming_bytes: int = 0
    outgoing_bytes: int = 0
    flops: int = 0
    outside_bytes: int = 0
    node_count: int = 0
    unknown_sizes: bool = False
    unknown_flops: bool = False
    _tensors: Tensors | HalfTensors = field(init=False)
    _weights: dict[str, int] = field(default_factory=dict)
    _takes: set[str] = field(default_factory=set)
    _axes: set[str] = field(default_factory=set)
    _outside: frozenset[str] = frozenset()
    _shapes: set[str] = field(default_factory=set)
    _constants: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.end, layout = self.start, self.layout
        self._tensors = layout.tensors() if self.asked_once else layout.foreseen(self.start)
        self._take_loose_outputs()

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
            for name in node.inputs:
                self._need(name)
            step = self.layout.steps[position]
            if isinstance(self._tensors, HalfTensors):
                self._run(position, step.dying)
            else:
                self._run_and_place(position, step, self._tensors)
        self._take_loose_outputs()

    def _run_and_place(self, position: int, step: Step, tensors: Tensors) -> None:
        touched = self.touched_bytes
        more = tensors.arena.most_bytes((*step.node.works_in, step.small_bytes))
        self._run(position, step.dying)
        # A node that only asks for shapes leaves the last one that computes the last.
        if step.node.role is Role.COMPUTE or not self._outside.isdisjoint(step.dying):
            self._place_outside(step, None if more is None else touched + more)

    def _place_outside(self, step: Step, without_bytes: int | None) -> None:
        """What a node gives, if it is the last one that computes. `without_bytes` of the arena are
        touched then at most; None: that is not known, and it stays in the arena."""
        self.outside_bytes, self._outside = 0, frozenset()
        may_be = step.axes_outside is not None and step.axes_outside <= self._axes
        if may_be and without_bytes is not None:
            self.outside_bytes = max(0, self.touched_bytes - without_bytes)
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
                for position in self._chain(name, available=None) or ():
                    self._run(position)
        elif name not in self._takes:
            self._takes.add(name)
            self._axes |= symbols(profile.tensors[name].spec)
            self.incoming_bytes += self._size(name)
            if (computed := self._computed(name)) > self._size(name):
                self._tensors.hold(name, computed)

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

    def _run(self, position: int, dying: Sequence[str] = ()) -> None:
        """Account for a node that runs here, after which nobody needs `dying`."""
        step = self.layout.steps[position]
        node = step.node
        self.node_count += step.runtime_nodes
        self.unknown_sizes |= step.unknown
        if node.weights:
            self._hold(node.weights, step.touched)
        for name in dying:
            if name in self._tensors.held and self.layout.makers.get(name, -1) >= self.start:
                self.outgoing_bytes -= self.layout.sent.get(name, 0)
        needed = self.layout.last_uses
        held = node.outputs if node.operator == LOOP else needed
        self._tensors.run(node, step.made, dying, held)
        if position >= self.start:
            self.outgoing_bytes += step.sent_bytes
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

    def _computed(self, name: str) -> int:
        self._size(name)  # which notes that a size is unknown
        return self.layout.profile.tensors[name].computed_bytes or 0

    def _size(self, name: str) -> int:
        size = self.layout.profile.tensors[name].bytes
        self.unknown_sizes |= size is None
        return size or 0

    def _chain(self, name: str, available: set[str] | None) -> set[int] | None:
        """The nodes before `start` that make a SHAPE tensor again, given what is available.

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
            elif maker not in chain:
                chain.add(maker)
                waiting.extend(self.layout.profile.nodes[maker].inputs)
        return chain
