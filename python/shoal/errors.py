"""Everything that is raised, besides `ValueError` for an argument that makes no sense.

ShoalError
├── PoolFailed        the pool cannot start, or cannot continue, or is of another process
│   └── PoolClosed    it was closed
├── ModelFailed       the model cannot be read, cut or placed, or no device can run it
└── ItemFailed        one item; the others run
"""

from typing import Any


class ShoalError(Exception):
    """What failed, and what to do. `need` and `have` are bytes of memory, where it is about memory;
    `device` is where it failed, if on one."""

    def __init__(
        self,
        what: str,
        *,
        need: int | None = None,
        have: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.need = need
        self.have = have
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        """As what it is, not made anew: `args` are the text, and not what `__init__` takes."""
        return _unpickled, (type(self), *self.args), self.__dict__


def _unpickled(kind: type[ShoalError], *args: object) -> ShoalError:
    return kind.__new__(kind, *args)


class PoolFailed(ShoalError):
    """The pool cannot start, a process of it ended again and again, or this process was forked
    from the one that has it."""


class PoolClosed(PoolFailed):
    """The pool was closed before, or during the call."""

    def __init__(self) -> None:
        super().__init__("the pool is closed")


class ModelFailed(ShoalError):
    """The model cannot be read, cut or placed, or no device can run it."""


class ItemFailed(ShoalError):
    """An item has no result. `item` is its place in what was given to `map`, 0 for `run`; `kind` is
    the reason as one word: InvalidInput, Budget, Runtime, ..."""

    def __init__(
        self,
        item: int,
        kind: str,
        message: str,
        *,
        need: int | None = None,
        have: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(f"item {item}: {message}", need=need, have=have, device=device)
        self.item = item
        self.kind = kind
