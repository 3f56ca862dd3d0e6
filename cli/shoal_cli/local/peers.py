"""The whole model in ONNX Runtime, in processes of their own, to be compared with: run when asked.

A peer loads the model, runs it once, and says so; then it runs it again for each line that it
receives. So peers and an agent can be measured in turns, and what slows the machine down for a
while slows down all of them. One line of JSON for each answer:
`{"loaded": {...}}`, then `{"seconds": ..., "peak_bytes": ...}` for each run.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from shoal_cli.local.steps import Json, begin_step, start_step
from shoal_cli.local.supervisor import session_signal

_MODULE: Final = "shoal_cli.local.peers"


class PeerFailed(Exception):
    """A peer cannot run the model, or was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest:
    """A model, one item as an `.npz`, and how it is loaded (`whole_model.Way`)."""

    model: Path
    item: Path
    way: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a peer took to load the model, and for its first run, which reads all weights."""

    load_seconds: float
    first_seconds: float


class Peer:
    """A peer that has loaded its model."""

    def __init__(self, process: asyncio.subprocess.Process, loaded: Loaded) -> None:
        self._process = process
        self.loaded = loaded
        self.peak_bytes = 0

    async def run(self) -> float:
        """The seconds of one run. Raises `PeerFailed`."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"run\n")
        answer = await _answer(self._process)
        self.peak_bytes = int(answer["peak_bytes"])
        return float(answer["seconds"])


@contextlib.asynccontextmanager
async def running_peer(request: PeerRequest) -> AsyncIterator[Peer]:
    """Start a peer; it is gone afterwards. Raises `PeerFailed`."""
    process = await start_step(_MODULE, asdict(request), asyncio.subprocess.DEVNULL)
    try:
        yield Peer(process, Loaded(**(await _answer(process))["loaded"]))
    finally:
        session_signal(process, signal.SIGKILL)
        await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> Json:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        status = await process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise PeerFailed(f"ended with {how}")
    answer: Json = json.loads(line)
    if "failed" in answer:
        raise PeerFailed(str(answer["failed"]))
    return answer


# ---- in the peer's process -----------------------------------------------------------------------


def main() -> None:
    """As a step."""
    request, say = begin_step()
    from shoal_cli.local.whole_model import ModelUnusable, Way, WholeModel  # noqa: PLC0415

    with np.load(request["item"]) as stored:
        feed = dict(stored)
    try:
        started = perf_counter()
        whole = WholeModel(Path(request["model"]), Way(request["way"]), threads=request["threads"])
        loaded = perf_counter()
        outputs = whole.output_names
        # A fragment, which is what is mapped, has no inputs that nothing reads.
        feed = {name: feed[name] for name in whole.input_names if name in feed}
        whole.run(outputs, feed)
        seconds = {"load_seconds": loaded - started, "first_seconds": perf_counter() - loaded}
        say({"loaded": seconds})
        for _ in sys.stdin:
            started = perf_counter()
            whole.run(outputs, feed)
            say({"seconds": perf_counter() - started, "peak_bytes": whole.peak_bytes})
    except ModelUnusable as error:
        say({"failed": str(error)})
