"""What fragments do without while memory is short on the machine.

Linux reports in which share of the time tasks wait for memory (PSI). While that is much, fragments
that can run in less get less, step by step; when it has passed, they get it back, in smaller steps:
who needed the memory may need it again. In between nothing changes.

What stalls while the agent's own group is at its limit is of its own making: it reads again what
had to go. To have less would make that worse, and give nobody anything. The same holds while the
machine has much memory available: what stalls then is at the limit of some group. In Kubernetes
that is the group of the agent's pod, which no container sees.

Only what fragments can do without is withheld, and half of the budget at most. Loads and
activations may still have it: what fits stays what the plan reckons with.
"""

from dataclasses import dataclass
from typing import Final

from shoal_protocol.units import Bytes

MUCH_PERCENT: Final = 10.0
LITTLE_PERCENT: Final = 1.0
PLENTY_FRACTION: Final = 1 / 4
"""Of a machine's memory, available: then it is not short of any."""
_MOST: Final = 2
_STEP_UP: Final = 8
_STEP_DOWN: Final = 32
"""Parts of the budget."""
_LOOKS: Final = 3
"""An average over ten seconds that is looked at every five has forgotten what was before."""


@dataclass(slots=True)
class Shortage:
    """How short memory is elsewhere, look by look. `limit_hits`: how often the group was at its
    limit until the last one."""

    limit_hits: int
    _looks: int = _LOOKS

    def elsewhere(
        self, stalled_percent: float | None, limit_hits: int, available_fraction: float | None
    ) -> float | None:
        """Of the time in which tasks waited, what is not of this group's own making.
        `available_fraction`: of the machine's memory; None: it does not say.
        """
        own = limit_hits != self.limit_hits
        own |= available_fraction is not None and available_fraction >= PLENTY_FRACTION
        self._looks = 0 if own else self._looks + 1
        self.limit_hits = limit_hits
        return stalled_percent if stalled_percent is None or self._looks >= _LOOKS else 0.0


def withheld(before: Bytes, budget: Bytes, stalled_percent: float | None) -> Bytes:
    """What is to be withheld, where so much was, and tasks wait for so much of the time; None: the
    machine does not say.
    """
    if stalled_percent is None:
        return Bytes(0)
    wanted = int(before)
    if stalled_percent >= MUCH_PERCENT:
        wanted += budget // _STEP_UP
    elif stalled_percent <= LITTLE_PERCENT:
        wanted -= max(1, budget // _STEP_DOWN)
    return Bytes(min(max(0, wanted), budget // _MOST))
