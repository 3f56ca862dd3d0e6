"""What the machine leaves of the budget while the agent runs: a container's limit that changes, and
memory that is short elsewhere.

In local mode (`exit_with_parent`) neither counts: the runner sets the limit by the budget, and the
agents of one machine would yield to one another.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shoal_agent.memory.pressure import withheld
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.settings import Settings
from shoal_agent.telemetry import pressure
from shoal_agent.telemetry.machine import Machine

_LIMIT_SECONDS: Final = 0.5
_PRESSURE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFollower:
    """`settled`: whether the floor has been measured."""

    settings: Settings
    machine: Machine
    meter: MemoryMeter
    fragments: Fragments
    settled: Callable[[], bool]

    async def run(self) -> None:
        """Follow both until it is cancelled."""
        if not self.settings.exit_with_parent:
            await asyncio.gather(self._follow_limit(), self._follow_pressure())

    async def _follow_limit(self) -> None:
        """Have the budget that the limit leaves, never more than the settings say."""
        while True:
            await asyncio.sleep(_LIMIT_SECONDS)
            limit = self.machine.memory_limit_bytes()
            if not self.settled() or limit is None:
                continue
            budget = min(self.settings.budget, max(0, limit - self.meter.floor_bytes))
            if budget != self.fragments.ledger.budget:
                await self.fragments.change_budget(budget)

    async def _follow_pressure(self) -> None:
        """Have fragments do without what they can, while memory is short on the machine."""
        paths, ledger = pressure.files(), self.fragments.ledger
        while paths:
            await asyncio.sleep(_PRESSURE_SECONDS)
            stalled = pressure.stalled_percent(paths)
            if (size := withheld(ledger.withheld, ledger.budget, stalled)) != ledger.withheld:
                await self.fragments.withhold(size)
