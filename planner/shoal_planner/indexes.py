"""A profile with indexes of it, computed once, for all that is worked out of its segments. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from shoal_planner.pieces import blocked_positions
from shoal_planner.profile import Halves, Profile, Role
from shoal_planner.steps import Step, steps_of


@dataclass(frozen=True)
class Index:
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

    @cached_property
    def first_makers(self) -> tuple[int, ...]:
        """For each position, that of the first node that makes something its node takes; -1 where
        it takes anything else than what nodes make that depend on inputs."""
        return tuple(min(map(self._maker, node.inputs), default=0) for node in self.profile.nodes)

    def _maker(self, name: str) -> int:
        maker = self.makers.get(name, -1)
        return -1 if maker < 0 or self.profile.nodes[maker].role is Role.CONSTANT else maker

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
    def crossing_bytes(self) -> tuple[int, ...]:
        """For each position, bytes of the tensors that are made before it and needed from there on,
        but for what depends on no input."""
        changes = [0] * (len(self.profile.nodes) + 2)
        for position, node in enumerate(self.profile.nodes):
            for name in node.outputs if node.role is not Role.CONSTANT else ():
                size = self.profile.tensors[name].bytes or 1
                changes[position + 1] += size
                changes[max(position, self.last_uses.get(name, 0)) + 1] -= size
        return tuple(accumulate(changes))

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
