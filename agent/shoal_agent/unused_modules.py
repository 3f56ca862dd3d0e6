"""Modules that libraries import as they start, and that an agent seldom or never uses.

asyncio imports `ssl` for streams of its own, though an agent's streams go through gRPC, which has
its own; protobuf imports its implementation in Python also where that in C is used; shutil looks
which compressors there are for archives. Together such modules take 2 MiB of an idle agent.

So an import of them gives a module that is executed when somebody first looks into it; whoever
needs it has it as ever. Only for modules of which nobody needs anything while importing: `from ssl
import ...` executes it at once. (What Python has for this, `importlib.util.LazyLoader`, executes a
module also when it is imported again, and most of these are.)

This module itself imports little: `importlib.abc` alone would bring in the compressors.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.abc import Loader

_SELDOM_USED: Final = frozenset(
    {
        "asyncio.sslproto",
        "bz2",
        "google.protobuf.internal.python_message",
        "lzma",
        "pickle",
        "ssl",
    }
)


class NotExecuted(ModuleType):
    """A module that was imported only. It becomes an ordinary one with the first look into it."""

    def __getattr__(self, name: str) -> Any:
        """Asked for what importing has not set. Imports and warnings ask every module for names
        with underscores, which says nothing of its use."""
        spec = self.__spec__
        if not name.startswith("__") and spec is not None and isinstance(spec.loader, _WhenUsed):
            spec.loader.execute(self, spec)
        if type(self) is NotExecuted:  # it is being executed, for one
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


class _WhenUsed:
    """In the place of a module's loader until then."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader
        self._lock = RLock()
        self._is_executing = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return NotExecuted(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not yet."""

    def execute(self, module: ModuleType, spec: ModuleSpec) -> None:
        """Once; other threads wait that ask for what it does not have yet."""
        with self._lock:
            if self._is_executing or not isinstance(module, NotExecuted):
                return
            self._is_executing = True
            try:
                self._loader.exec_module(module)
            finally:
                self._is_executing = False
            spec.loader = module.__loader__ = self._loader
            module.__class__ = ModuleType  # type: ignore[assignment]


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _SELDOM_USED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WhenUsed(spec.loader)  # type: ignore[assignment]
        return spec


def execute_when_used() -> None:
    """From now on; what has been imported before is there already."""
    sys.meta_path.insert(0, _Finder())
