"""What a cut gives: segments of a profile, and the pieces that fragments are made of. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_planner.profile import Profile, Role

CONSTANT_BYTES: Final = 1 << 20
"""Up to here it does not matter when a fragment's constants are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of nodes by itself: positions in `profile.nodes`, in order, with what is made again.

    `takes` are the tensors that it is sent, `incoming_bytes` theirs; `resident_bytes` is what a
    device must have. Both are upper bounds where SHAPE tensors are made again.
    """

    start: int
    end: int
    nodes: tuple[int, ...]
    takes: frozenset[str]
    activation_bytes: int | None
    resident_bytes: int
    flops: int | None
    incoming_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A segment among the others: without nodes that nobody needs, and with what it gives.

    `nodes` are in the order in which they run. `takes` and `gives` are in the order of names,
    `weights` in the order of use.
    """

    segment: Segment
    nodes: tuple[int, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    weights: tuple[str, ...]

    def in_order(self, profile: Profile) -> bool:
        """Whether the runtime is to run the nodes in this very order. By itself it goes back from
        the outputs, and where branches join, more is alive at once. In a given order it runs each
        node as soon as it can, so CONSTANT ones all at once: much of those it is left to order."""
        constant = [
            profile.tensors[name].computed_bytes
            for each in self.nodes
            if profile.nodes[each].role is Role.CONSTANT
            for name in profile.nodes[each].outputs
        ]
        return None not in constant and sum(filter(None, constant)) <= CONSTANT_BYTES


def just_in_time(
    profile: Profile, makers: Mapping[str, int], positions: Sequence[int]
) -> tuple[int, ...]:
    """Nodes in an order in which each CONSTANT one comes directly before its first use: run at
    once, they would make single precision of all quantised weights together."""
    nodes, ordered = profile.nodes, dict[int, None]()
    waiting = {each for each in positions if nodes[each].role is Role.CONSTANT}
    for position in positions:
        if position in waiting:
            continue
        needed, stack = list[int](), [position]
        while stack:
            found = [makers.get(name) for name in nodes[stack.pop()].inputs]
            constant = [each for each in found if each in waiting]
            waiting.difference_update(constant)
            needed += constant
            stack += constant
        ordered |= dict.fromkeys((*sorted(needed), position))
    return (*ordered, *sorted(waiting))


def blocked_positions(
    profile: Profile, makers: Mapping[str, int], last_uses: Mapping[str, int]
) -> Mapping[int, str]:
    """Positions where some tensor would cross that cannot be sent, and which."""
    unsent = [
        (makers.get(name, -1), name) for name, tensor in profile.tensors.items() if tensor.obstacle
    ]
    blocked: dict[int, str] = {}
    end = 0  # of what is blocked so far
    for maker, name in sorted(unsent, key=lambda each: each[0]):
        if maker >= 0 and profile.nodes[maker].role is Role.CONSTANT:
            continue
        reason = f"{name} would cross, and {profile.tensors[name].obstacle}"
        last = last_uses.get(name, 0) + 1
        blocked.update(dict.fromkeys(range(max(maker + 1, end), last), reason))
        end = max(end, last)
    return blocked
