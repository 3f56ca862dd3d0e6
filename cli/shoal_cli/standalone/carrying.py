"""A job of a coordinator that follows a folder of this machine: inputs go there as they come, and
results come back as they are made.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal_cli.transfer.coordinators import JobFolder
from shoal_cli.transfer.feeds import Feed, Feeds
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.joined import Reachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A job, whose name there is `job`; `inputs` and `outputs` are its folders here."""

    coordinator: Reachable
    job: str
    inputs: Path
    outputs: Path

    def feeds(self, note: Callable[[str], None]) -> Feeds:
        """Its inputs to there, its results from there."""
        inputs = Folder(str(self.inputs), self.inputs)
        outputs = Folder(str(self.outputs), self.outputs)
        there = self._there
        sending = Feed(source=lambda: inputs, target=partial(there, "in"), note=note)
        fetching = Feed(
            source=partial(there, "out"), target=lambda: outputs, note=note, changed=True
        )
        return Feeds([sending], [fetching])

    @contextlib.asynccontextmanager
    async def _there(self, folder: str) -> AsyncIterator[JobFolder]:
        place = f"jobs/{self.job}/{folder}"
        async with self.coordinator.calling() as client:
            yield JobFolder(f"coordinator://{self.coordinator.target}/{place}", client, place)
