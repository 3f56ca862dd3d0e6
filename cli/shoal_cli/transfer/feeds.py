"""What is new in one place goes to another, for as long as a run is active.

A `Feed` is one way of one job. `Feeds` are those of a run whose jobs follow addresses of other
machines: inputs come into the job's folder here, results go from its folder there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from shoal_cli.transfer.following import copy_new
from shoal_cli.transfer.joined import CallRefused, CoordinatorAway, JoinRefused
from shoal_cli.transfer.places import Source, Target, TransferBroken, TransferRefused

Note = Callable[[str], None]

_REASONS = (TransferBroken, TransferRefused, CoordinatorAway, CallRefused, JoinRefused)


@dataclass(slots=True, kw_only=True)
class Feed:
    """Where files come from and where they go is opened each time. `note` receives what goes wrong
    and is tried again. `changed`: a file whose size changes is copied again, as the result of a
    file that was retried."""

    source: Callable[[], AbstractAsyncContextManager[Source]]
    target: Callable[[], AbstractAsyncContextManager[Target]]
    note: Note
    changed: bool = False
    _following: asyncio.Task[None] | None = field(default=None, init=False)

    @contextlib.asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Copy what comes while the context lasts."""
        self._following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            await self._stop()

    async def last(self) -> None:
        """Copy what is there now, and no more. Raises as `copy` does."""
        await self._stop()
        await self.copy(follow=False)

    async def copy(self, *, follow: bool) -> None:
        """Copy what the target lacks. Raises `TransferBroken`, `TransferRefused`,
        `CoordinatorAway`, `CallRefused`."""
        async with self.source() as source, self.target() as target:
            await copy_new(source, target, self.note, follow=follow, changed=self.changed)

    async def _follow(self) -> None:
        try:
            await self.copy(follow=True)
        except _REASONS as error:
            self.note(str(error))

    async def _stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])


@dataclass(slots=True)
class Feeds:
    """Feeds of inputs, and of results."""

    inputs: list[Feed] = field(default_factory=list)
    results: list[Feed] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """All of them are active while the context lasts."""
        async with contextlib.AsyncExitStack() as stack:
            for feed in (*self.inputs, *self.results):
                await stack.enter_async_context(feed.active())
            yield

    def add(self, other: "Feeds") -> None:
        """Those of another job too."""
        self.inputs += other.inputs
        self.results += other.results

    async def last_inputs(self) -> None:
        """Copy the inputs that are there now, and no more; `note` receives what goes wrong."""
        for feed in self.inputs:
            try:
                await feed.last()
            except _REASONS as error:
                feed.note(str(error))
