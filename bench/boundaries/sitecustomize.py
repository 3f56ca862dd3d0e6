"""Stamps of an item's way in the processes of a pool, for `item_latency`.

Python imports this when a process starts whose PYTHONPATH has the folder. A stamp is when the item
came to a boundary, and what the thread had used of a processor by then. SIGUSR1 has a process write
those that it has, and begin anew. The product knows nothing of this: its functions are wrapped by
name, and a name that is gone ends the process.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
_BEFORE, _AFTER = "before", "after"
_BOUNDARIES: Final = {
    "shoal_coordinator.server.stream_runs": [
        ("StreamRun.add", _BEFORE, "the coordinator has the item"),
        ("StreamRun.finish", _BEFORE, "the item is done"),
    ],
    "shoal_coordinator.server.item_streams": [("frames_of", _BEFORE, "the answer is made")],
    "shoal_coordinator.server.travels": [
        ("Travels.depart", _BEFORE, "the item is decided"),
        ("Travels.take_items", _BEFORE, "the results are there"),
    ],
    "shoal_coordinator.server.runs": [("JobRun.finish", _BEFORE, "the item is done")],
    "shoal_coordinator.storage.results": [("ResultStore.finish", _AFTER, "the log is synced")],
    "shoal_agent.session.itineraries": [
        ("Itineraries.take_items", _BEFORE, "a device has the item"),
    ],
    "shoal_agent.runtime.whole_fragment": [
        ("WholeFragment.run", _BEFORE, "ONNX Runtime begins"),
        ("WholeFragment.run", _AFTER, "ONNX Runtime ends"),
    ],
    "shoal_protocol.bulk.link": [("BulkLink.push", _AFTER, "sent on")],
}
_stamps: list[tuple[str, int, int, int]] = []


def _stamp(name: str) -> None:
    _stamps.append((name, time.monotonic_ns(), threading.get_ident(), time.thread_time_ns()))


def _wrap(module: ModuleType, path: str, when: str, name: str) -> None:
    *parents, last = path.split(".")
    owner: Any = functools.reduce(getattr, parents, module)
    function: Callable[..., Any] = getattr(owner, last)

    is_awaited = bool(function.__code__.co_flags & inspect.CO_COROUTINE)
    assert not (is_awaited and when == _AFTER), "it is over later than it returns"

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if when == _BEFORE:
            _stamp(name)
        try:
            return function(*arguments, **named)
        finally:
            if when == _AFTER:
                _stamp(name)

    setattr(owner, last, called)


class _Loader(importlib.abc.Loader):
    """Loads a module as it would be, and wraps what is to be stamped in it."""

    def __init__(self, name: str, loader: importlib.abc.Loader) -> None:
        self._name = name
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for boundary in _BOUNDARIES[self._name]:
            _wrap(module, *boundary)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _BOUNDARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:  # an editable install may have a finder of its own
            for other in sys.meta_path:
                if other is not self and (spec := other.find_spec(name, path, target)):
                    break
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(name, spec.loader)
        return spec


def _write(*_: object) -> None:
    stamps = _stamps.copy()
    _stamps.clear()
    part = FOLDER / f"{os.getpid()}.part"
    part.write_text(json.dumps(stamps))
    part.rename(part.with_suffix(".json"))


if any(each in sys.orig_argv for each in ("shoal_agent", "shoal_coordinator")):
    sys.meta_path.insert(0, _Finder())
    signal.signal(signal.SIGUSR1, _write)
