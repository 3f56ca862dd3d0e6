"""Ray in a process of its own (`ray_pipeline`), beside the bench that asks it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

_SECONDS: Final = 240.0
_SHOWN: Final = 2000


class RayProcess:
    """Has a compiled graph that is warm. To be ended by leaving its context.

    Actors of a compiled graph wait for their input by looking again and again, and keep the
    processors busy with that. So they are stopped while nobody asks them.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        """`request` as in `ray_pipeline`. Returns when the graph is warm."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_pipeline.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._limit = threading.Timer(_SECONDS, self._process.kill)
        self._limit.daemon = True
        self._limit.start()
        self._actors: Sequence[int] = ()
        self._actors = self._ask(json.dumps(request))
        self._signal_actors(signal.SIGSTOP)

    def latencies(self, count: int) -> list[float]:
        """Seconds of each of so many calls, one after the other."""
        self._signal_actors(signal.SIGCONT)
        taken: list[float] = self._ask(str(count))
        self._signal_actors(signal.SIGSTOP)
        return taken

    def finish(self) -> dict[str, Any]:
        """The other figures, which it measures now."""
        self._signal_actors(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        figures: dict[str, Any] = self._answer()
        return figures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._signal_actors(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _signal_actors(self, number: signal.Signals) -> None:
        for actor in self._actors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor, number)

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("[", "{")):  # Ray has lines of its own
                return json.loads(line)
        self._errors.seek(0)
        raise SystemExit(f"Ray failed:\n{self._errors.read()[-_SHOWN:]}")
