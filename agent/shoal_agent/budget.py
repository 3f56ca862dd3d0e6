"""The budget while the agent runs: what it is told in a file, and what the machine leaves of that,
by a container's limit that changes and by memory that is short elsewhere. And what the agent leaves
of a limit that can be lowered.

In local mode (`exit_with_parent`) neither counts: the runner sets the limit by the budget, and the
agents of one machine would yield to one another.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from shoal_agent.memory.pressure import Shortage, withheld
from shoal_agent.memory.told_budgets import left_by, read_budget
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.library_files import library_files, uncache
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.settings import Settings
from shoal_agent.telemetry import pressure
from shoal_agent.telemetry.logs import log
from shoal_agent.telemetry.machine import Machine
from shoal_protocol.threads import in_thread
from shoal_protocol.units import Bytes, format_bytes

_LIMIT_SECONDS: Final = 0.05
"""Between two polls while a fragment is resident. One takes 40 microseconds."""
_IDLE_LIMIT_SECONDS: Final = 0.5
_PRESSURE_SECONDS: Final = 5.0
_ROOM_SECONDS: Final = 2.0
_ROOM_AT_MOST_SECONDS: Final = 16.0
"""To make room takes 7 milliseconds, and may have to be done again and again. An agent that loads
fragments in turn reads 100 MB/s of its libraries then, so it is done less and less often."""


class ToldBudget:
    """The budget that is told in a file, where there is one: it is written anew as a whole, as a
    kubelet does. What makes no sense there leaves the budget as it was."""

    def __init__(self, file: Path | None, budget: Bytes, machine_bytes: int) -> None:
        """`budget` is that of the start."""
        self._file = file
        self._machine_bytes = machine_bytes
        self._text = ""
        self.budget = budget

    def read(self) -> Bytes:
        """As it is told now."""
        if self._file is None:
            return self.budget
        try:
            text = self._file.read_text()
        except (OSError, ValueError) as error:
            text = f"cannot be read: {error}"
        if text != self._text:
            self._text = text
            try:
                self.budget = read_budget(text, self._machine_bytes)
            except ValueError as error:
                log.warning("the budget stays as it is: %s says: %s", self._file, error)
        return self.budget


class BudgetFollower:
    """Follows file, limit and pressure, and keeps libraries out of the room of a limit to come."""

    def __init__(
        self, settings: Settings, machine: Machine, meter: MemoryMeter, fragments: Fragments
    ) -> None:
        self.settings = settings
        self.machine = machine
        self.meter = meter
        self.fragments = fragments
        self._told = ToldBudget(settings.budget_file, settings.budget, machine.physical_bytes)
        self._settled = asyncio.Event()
        self._libraries: frozenset[str] = frozenset()

    def find_libraries(self) -> None:
        """While no fragment is open. Before the floor is measured, which their paths are part of;
        where nobody will ask for them there are none."""
        if not self.settings.exit_with_parent:
            self._libraries = library_files()

    async def catch_up(self) -> Bytes:
        """Have the budget that is told now, which may be another than that of the start."""
        if (budget := self._told.read()) != self.fragments.ledger.budget:
            await self.fragments.change_budget(budget)
        return budget

    async def settled(self) -> None:
        """The floor has been measured, and no fragment is open yet."""
        await self._make_room()
        self._settled.set()

    def loops(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What has to run, by name, each until it is cancelled."""
        if self.settings.exit_with_parent:
            return {}
        return {
            "limit": self._follow_limit,
            "room": self._keep_making_room,
            "pressure": self._follow_pressure,
        }

    async def _follow_limit(self) -> None:
        """Have the budget that is told, as far as the limit leaves it. What a change asks of
        fragments waits for the input that runs; the next change does not wait for that."""
        await self._settled.wait()
        ledger = self.fragments.ledger
        async with asyncio.TaskGroup() as changes:
            following = int(ledger.budget)
            while True:
                await asyncio.sleep(_LIMIT_SECONDS if ledger.resident else _IDLE_LIMIT_SECONDS)
                limit, floor = self.machine.memory_limit_bytes(), self.meter.floor_bytes
                budget = left_by(limit, floor, self._told.read())
                if budget != following:
                    following = budget
                    changes.create_task(self.fragments.change_budget(budget))

    async def _keep_making_room(self) -> None:
        await self._settled.wait()
        pause = _ROOM_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = next_pause(pause, had_to=await self._make_room())

    async def _make_room(self) -> bool:
        """Have no more charged to the container than floor and budget, to which its limit is to be
        lowered: until then the kernel sees no reason to give cached files back. Whether that had to
        be done."""
        if self.settings.exit_with_parent:
            return False
        limit = self.machine.memory_limit_bytes()
        needed = self.meter.floor_bytes + self._told.budget
        charged = self.machine.memory_charged_bytes()
        had_to = limit is not None and charged is not None and needed < min(limit, charged)
        if had_to:
            await in_thread(uncache, self._libraries)
        return had_to

    async def _follow_pressure(self) -> None:
        """Have fragments do without what they can, while memory is short on the machine."""
        paths, ledger = pressure.files(), self.fragments.ledger
        shortage = Shortage(self.machine.memory_limit_hits())
        while paths:
            await asyncio.sleep(_PRESSURE_SECONDS)
            hits, available = self.machine.memory_limit_hits(), self.machine.available_fraction()
            stalled = shortage.elsewhere(pressure.stalled_percent(paths), hits, available)
            if (size := withheld(ledger.withheld, ledger.budget, stalled)) != ledger.withheld:
                await self.fragments.withhold(size)


def next_pause(seconds: float, *, had_to: bool) -> float:
    """Until there is to be room again: longer where what had to go was back after so long."""
    return min(2 * seconds, _ROOM_AT_MOST_SECONDS) if had_to else _ROOM_SECONDS


def beyond(limit: int | None, floor: int, budget: int) -> str | None:
    """What a container's limit lacks for the idle agent and the budget, and what to do; None: it
    has both. An agent that takes more would be killed in the midst of its work."""
    if limit is None or floor + budget <= limit:
        return None
    return (
        f"the idle agent takes {format_bytes(floor)}; the limit of {format_bytes(limit)} "
        f"leaves {format_bytes(max(0, limit - budget))} beside the budget of "
        f"{format_bytes(budget)}: raise the limit by "
        f"{format_bytes(floor + budget - limit)}, or lower the budget"
    )
