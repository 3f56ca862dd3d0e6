"""A job of a coordinator that follows a folder of this machine: inputs go there as they come, and
results come back as they are made.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from shoal_cli.transfer.coordinators import JobFolder
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.following import LOOK_SECONDS, copy_new
from shoal_cli.transfer.joined import CallRefused, CoordinatorAway, Reachable
from shoal_cli.transfer.places import TransferBroken, TransferRefused


@dataclass(slots=True, kw_only=True)
class Carrier:
    """Of one job, whose name there is `job`; `inputs` and `outputs` are its folders here. `note`
    receives what goes wrong and is tried again."""

    coordinator: Reachable
    job: str
    inputs: Path
    outputs: Path
    note: Callable[[str], None]
    look_seconds: float = LOOK_SECONDS
    _sending: asyncio.Task[None] | None = field(default=None, init=False)

    @contextlib.asynccontextmanager
    async def carrying(self) -> AsyncIterator[None]:
        """Carry both ways while the context lasts."""
        self._sending = asyncio.create_task(self._noted(self.send(follow=True)))
        tasks = [self._sending, asyncio.create_task(self._noted(self.fetch(follow=True)))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def last_inputs(self) -> None:
        """Send what is there now, and no more. Raises as `send` does."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        await self.send(follow=False)

    async def send(self, *, follow: bool) -> None:
        """Send the inputs that are not there. Raises `TransferBroken`, `TransferRefused`,
        `CoordinatorAway`, `CallRefused`."""
        async with self._folder("in") as there:
            here = Folder(str(self.inputs), self.inputs)
            await copy_new(here, there, self.note, follow=follow, look_seconds=self.look_seconds)

    async def fetch(self, *, follow: bool) -> None:
        """Fetch the results that are not here. Raises as `send` does."""
        async with self._folder("out") as there:
            here = Folder(str(self.outputs), self.outputs)
            await copy_new(there, here, self.note, follow=follow, look_seconds=self.look_seconds)

    @contextlib.asynccontextmanager
    async def _folder(self, folder: str) -> AsyncIterator[JobFolder]:
        place = f"jobs/{self.job}/{folder}"
        async with self.coordinator.calling() as client:
            yield JobFolder(f"coordinator://{self.coordinator.target}/{place}", client, place)

    async def _noted(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except (TransferBroken, TransferRefused, CoordinatorAway, CallRefused) as error:
            self.note(str(error))
