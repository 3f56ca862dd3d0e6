"""The memory limit of each device's group: what is charged to its idle agent, and its budget.

The limit is set once, when the agent is idle and before it receives work. An agent that is started
again receives work at once, and may take more for itself than the one before it, or less: the limit
follows the floors that agents measure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_cli.local.cgroups import DeviceGroup
from shoal_protocol.units import format_bytes


@dataclass(slots=True)
class DeviceLimits:
    """`sizes` are the limits that are set, by device. `on_note` receives a device and a text for
    each that cannot be."""

    on_note: Callable[[str, str], None]
    sizes: dict[str, int] = field(default_factory=dict)
    _groups: dict[str, DeviceGroup] = field(default_factory=dict)
    _floors: dict[str, int] = field(default_factory=dict)

    def set(self, name: str, group: DeviceGroup, budget_bytes: int, floor_bytes: int) -> None:
        """The agent is idle now."""
        self._groups[name], self._floors[name] = group, floor_bytes
        self._limit(name, group.charged_bytes() + budget_bytes)

    def follow(self, name: str, floor_bytes: int) -> None:
        """The agent's floor is this now; 0: it has not measured any."""
        if name not in self.sizes or not floor_bytes:
            return
        if change := floor_bytes - self._floors[name]:
            self._floors[name] = floor_bytes
            self._limit(name, self.sizes[name] + change)

    def _limit(self, name: str, size: int) -> None:
        try:
            self._groups[name].limit_memory(size)
        except OSError as error:
            self.on_note(name, f"no limit of {format_bytes(size)}: {error.strerror}")
        else:
            self.sizes[name] = size
