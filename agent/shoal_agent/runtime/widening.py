"""Fragments are opened whole beside their blocks, which go on running, each in a thread of its own.

To open a large fragment takes some hundred milliseconds, most of them for packing. When a budget
grows nobody waits for that: the blocks are granted what opening leaves of the new grant, and the
whole takes their place between two runs when it is open. Its weights come into memory when it runs,
and those of the blocks are gone by then. So at every moment both have no more than the grant.

A run that is guarded is to have, and is measured against, all that there is for it, and so is a
trial: what is being opened beside it is stopped, which the runtime does between two weights, and
begins again afterwards. Where that happened `_TRIES` times, a run waits for the end instead.
"""

import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import onnxruntime

from shoal_agent.runtime.failures import RuntimeFailed
from shoal_agent.runtime.whole_fragment import Whole, WholeFragment

_TRIES: Final = 4


@dataclass(slots=True)
class _Opening:
    """`ended` says whether it is open."""

    options: onnxruntime.SessionOptions
    ended: Future[bool] = field(default_factory=Future)
    fragment: WholeFragment | None = None
    why_not: str = ""
    stopped: bool = False

    def begin(self, whole: Whole) -> None:
        self.ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        threading.Thread(target=self._open, args=(whole,), name="open", daemon=True).start()

    def _open(self, whole: Whole) -> None:
        try:
            self.fragment = whole.open(self.options)
        except RuntimeFailed as error:
            self.why_not = str(error)  # the error itself would hold on to half a session
        finally:
            self.ended.set_result(self.fragment is not None)

    def stop(self) -> None:
        self.stopped = True
        self.options.set_load_cancellation_flag(True)


class Widening:
    """What is to be opened beside, by its digest. Not thread-safe: for the processor's thread."""

    def __init__(self, threads: int) -> None:
        """`threads` are those of each session."""
        self._threads = threads
        self._wanted: dict[str, Whole] = {}
        self._openings: dict[str, _Opening] = {}
        self._stops: Counter[str] = Counter()

    @property
    def under_way(self) -> bool:
        return any(not each.ended.done() for each in self._openings.values())

    def want(self, digest: str, whole: Whole) -> None:
        """A fragment is to be opened so, beside its blocks."""
        self._wanted[digest] = whole

    def wants(self, digest: str) -> bool:
        return digest in self._wanted

    def step(self, digest: str) -> WholeFragment | Future[bool] | None:
        """The fragment, if it is open by now; else what will say whether it is, when that has been
        tried. None: nothing is wanted. Raises `RuntimeFailed` where it cannot be opened."""
        if (whole := self._wanted.get(digest)) is None:
            return None
        opening = self._openings.get(digest)
        if opening is not None and opening.ended.done():
            del self._openings[digest]
            if (fragment := opening.fragment) is not None or not opening.stopped:
                self.discard(digest)
                if fragment is None:
                    raise RuntimeFailed(opening.why_not)
                return fragment
            opening = None
        if opening is None:
            opening = self._openings[digest] = _Opening(whole.options(self._threads))
            opening.begin(whole)
        return opening.ended

    def stop(self) -> None:
        """On return nothing is being opened; as `discard`. What is open waits until it is asked
        for."""
        for digest, opening in self._openings.items():
            if not opening.ended.done() and self._stops[digest] < _TRIES:
                self._stops[digest] += 1
                opening.stop()
            opening.ended.result()

    def discard(self, digest: str) -> bool:
        """It is not wanted any more. Whether it had begun: on return nothing is left of it but what
        is free in heap and arena."""
        self._wanted.pop(digest, None)
        self._stops.pop(digest, None)
        if (opening := self._openings.pop(digest, None)) is None:
            return False
        opening.stop()
        opening.ended.result()
        opening.fragment = None  # its thread may have a moment to go
        return True
