"""What the processes of a pool tell a bench about themselves, which the product knows nothing of.

A folder that Python imports from when such a process starts has it write, each time that it gets
SIGUSR1, what it has found since the last time, into a file there that is named after the process.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from pool import Pool

_WRITTEN_SECONDS: Final = 10.0


class Asked:
    """Processes of a pool that is started while `imported` is open."""

    def __init__(self, source: Path, folder: Path, processes: tuple[str, ...]) -> None:
        self.folder = folder
        self._processes = processes
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))

    async def take(self, pool: Pool) -> Mapping[str, Any]:
        """By process of the pool, what it has found, which it then forgets."""
        return {name: await self._written(pool.process_id(name)) for name in self._processes}

    async def _written(self, process: int) -> Any:
        os.kill(process, signal.SIGUSR1)
        path = self.folder / f"{process}.json"
        async with asyncio.timeout(_WRITTEN_SECONDS):
            while not path.exists():
                await asyncio.sleep(0.01)
        found = json.loads(path.read_text())
        path.unlink()
        return found

    @asynccontextmanager
    async def imported(self) -> AsyncIterator[None]:
        """By the processes that are started in the body."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.folder), before]))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
