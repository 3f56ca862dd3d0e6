"""Which namespaces the operator has seen as a whole.

One of those that it was given may be gone, or its Role not be there yet: then the API server lists
nothing of it. That keeps no other namespace waiting. Nothing is decided in a namespace before all
its kinds were listed, since a pool that is seen without its jobs would have their runs stopped. One
that was seen, and cannot be read any more, is as it was last.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Namespaces:
    """`names`: those that the operator was given; none means all. `opened` is called when one is
    seen as a whole that was closed.
    """

    names: tuple[str, ...]
    opened: Callable[[], None]
    _seen: set[str] = field(default_factory=set)
    _closed: dict[str, str] = field(default_factory=dict)

    @property
    def scopes(self) -> tuple[str, ...]:
        """What to list one after the other; "" is all of them."""
        return self.names or ("",)

    @property
    def closed(self) -> tuple[str, ...]:
        """Those that could not be read last."""
        return tuple(sorted(self._closed))

    def close(self, name: str, why: str) -> None:
        """The API server does not let the operator read it."""
        if name not in self._closed:
            logger.warning("namespace %s cannot be read: %s", name, why)
        self._closed[name] = why

    def open(self, name: str) -> None:
        """All kinds of it were listed."""
        self._seen.add(name)
        if self._closed.pop(name, None) is not None:
            logger.info("namespace %s can be read", name)
            self.opened()

    def is_seen(self, name: str) -> bool:
        """Whether what the cache has of it is all that there is."""
        return name in self._seen or "" in self._seen

    def problem(self) -> str | None:
        """Which of them cannot be read, and what to do; None where all can."""
        for name, why in sorted(self._closed.items()):
            others = f" (and {len(self._closed) - 1} more)" if len(self._closed) > 1 else ""
            return (
                f"namespace {name}{others} cannot be read: {why}; where it is gone, take it out of "
                f"rbac.namespaces"
            )
        return None
