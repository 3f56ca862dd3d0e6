"""What to grant a fragment that was tried before it is given work, and took more than there is.

A trial runs the fragment once, with inputs of the largest shapes that were planned for. What it
takes replaces the estimate. Where that is more than the device has, a prepared fragment is tried
as it was cut, for its values may take more prepared; then in blocks, with less resident, down to
the least that blocks need: then nothing on this device helps.
"""

from dataclasses import dataclass
from typing import Final

from shoal_protocol.units import Bytes

MOST_TRIALS: Final = 3
"""The last one is with the least grant."""
_WORTH: Final = 4
"""An estimate within one part in so many of what is free may be wrong by that factor."""
_NOISE: Final = 32
_SLOWER: Final = 4
_CONSTANT_BYTES: Final = 1 << 20
"""Of what a run takes beside weights, what is the same for inputs of each size: kernels' own."""
_LITTLE_BYTES: Final = 256 << 10
"""What a run takes is not in proportion to inputs smaller than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The fragment took that much when it ran within `granted` with inputs of `input_bytes`; at
    least that, if `stopped`. `fixed` is what is not activations. `prepared`: it ran as a whole, in
    the form prepared for it. `bounded`: with all of the runtime's arena it takes more than there
    is."""

    granted: Bytes
    taken: Bytes
    fixed: Bytes = Bytes(0)
    input_bytes: Bytes = Bytes(0)
    stopped: bool = False
    prepared: bool = False
    bounded: bool = False

    def need(self, input_bytes: int) -> Bytes:
        """What an item takes: as much as this one, or more if it is larger. Activations are taken
        to grow at least by what inputs do, and a quarter as fast: a run is bounded anyway. A few
        tokens more than planned are no reason to refuse an item."""
        growth = max(0, input_bytes - self.input_bytes)
        activations = max(0, self.taken - self.fixed - _CONSTANT_BYTES)
        more = activations * growth // (_SLOWER * max(self.input_bytes, _LITTLE_BYTES))
        return Bytes(self.taken + max(growth, more))


def is_worth_a_trial(need: int, free: int) -> bool:
    """Whether an error of the estimate could exceed what is `free` for it, `need` included."""
    return _WORTH * need > free


def need_of_stopped(had: int, budget: int) -> Bytes:
    """What to ask for where a run was stopped that had so much; by how much it exceeds that is not
    known. Half as much again, up to the budget; more than the budget, if it had all of that."""
    return Bytes(max(had + 1, min(had + had // 2, budget)))


def next_grant(trial: Trial, least: Bytes, room: Bytes, number: int) -> Bytes | None:
    """What to grant after the trial of that number, counted from 1, which took more than the
    room; None: less does not help, or cannot be granted."""
    if trial.granted <= least:
        return None
    if number + 1 >= MOST_TRIALS:
        return least
    less = trial.granted - (trial.taken - room) * 5 // 4 - room // _NOISE
    if trial.stopped:  # by how much it exceeds the room is not known
        less = min(less, (trial.granted + least) // 2)
    return Bytes(max(least, less))
