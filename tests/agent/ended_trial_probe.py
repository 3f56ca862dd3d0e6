"""A process of a test: `python ended_trial_probe.py FOLDER DIGEST [as-work]` loads a fragment from
a cache, and is ended where a trial runs as a whole, as the kernel ends an agent at its limit, or
only where it runs as work does. It prints what the fragment was granted, or what it needs, or that
its items are bounded."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent.in_process import MIB, Thread, make_fragments
from shoal_agent.runtime.failures import OverBudget
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.results import RunResult
from shoal_agent.runtime.runs import OpenFragment, Runs
from shoal_agent.runtime.whole_fragment import WholeFragment

AS_WORK = sys.argv[3:] == ["as-work"]


class EndingRuns(Runs):
    """The kernel ends the process when a whole fragment is tried."""

    def ends(self) -> bool:
        return True

    def run_guarded(self, fragment: OpenFragment, *arguments: Any, **options: Any) -> RunResult:
        if isinstance(fragment, WholeFragment) and self.ends():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run_guarded(fragment, *arguments, **options)


class Ending(Runtime):
    """Has such runs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        runs = self._runs
        ending = EndingRuns(runs._meter, runs._processor_clock, runs._note_peak, runs._shrink)
        if AS_WORK:
            ending.ends = lambda: not self._arena.ballast.holds  # type: ignore[method-assign]
        self._runs = ending


async def load(folder: Path, digest: str) -> str:
    with Thread(1) as thread:
        fragments = make_fragments(folder, thread, budget=24 * MIB, kind=Ending)
        try:
            await fragments.load(digest, 20 * MIB, [])
        except OverBudget as error:
            return f"needs {error.need_bytes}, has {error.have_bytes}"
        finally:
            await fragments.close()
        if not fragments.opening.is_known(digest):
            return "bounded"
        return f"granted {fragments.ledger.shares[digest].granted}"


if __name__ == "__main__":
    print(asyncio.run(load(Path(sys.argv[1]), sys.argv[2])))
