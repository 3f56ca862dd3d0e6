"""The items of a job as one message each: `ListItems`."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import Final, NamedTuple

from shoal_coordinator.dispatch.state import Item as ActiveItem
from shoal_coordinator.jobs.values import Refusal
from shoal_coordinator.server.lives import Life
from shoal_coordinator.server.refusals import JobRefused
from shoal_coordinator.storage.followed_items import stored_followed_items
from shoal_coordinator.storage.item_list import Items, ListedItem, stored_items
from shoal_coordinator.storage.locations import LocationRefused, local_folder
from shoal_protocol.v1 import coordinator_pb2 as pb

PAGE: Final = 256
_TEXT: Final = 1000
"""Characters of a reason."""


class Active(NamedTuple):
    """An item on its way: which try it is, and the device of its newest task."""

    tries: int
    device: str


async def items_of(life: Life) -> tuple[Items, Mapping[int, Active]]:
    """How a job's items have ended, and which are active. Raises `JobRefused` where that is not
    known."""
    view, run, name = life.view(), life.run, life.job.name
    if run is not None:
        active = {} if view is None else {n: _active(item) for n, item in view.active.items()}
        return await run.items(), active
    if not life.has_ended:
        reason = f"job {name} begins or ends just now; ask again in a moment"
        raise JobRefused(reason, Refusal.LACKING)
    return await asyncio.to_thread(_ended_items, life), {}


async def pages(
    items: Items,
    active: Mapping[int, Active],
    states: Collection[pb.JobItem.State],
) -> AsyncIterator[pb.ItemPage]:
    """The items in these states, in their order; of none: all items. A thread searches them. Raises
    `OSError`."""
    found = _pages(items, active, states)
    while (page := await asyncio.to_thread(next, found, None)) is not None:
        yield page


def _pages(
    items: Items, active: Mapping[int, Active], states: Collection[pb.JobItem.State]
) -> Iterator[pb.ItemPage]:
    page = pb.ItemPage()
    for listed in items:
        item = _item(listed, active.get(listed.item))
        if states and item.state not in states:
            continue
        page.items.append(item)
        if len(page.items) == PAGE:
            yield page
            page = pb.ItemPage()
    if page.items:
        yield page


def require_failed(job: str, items: Items, named: Collection[int]) -> None:
    """Raises `JobRefused` where one of the items has not failed, or none has."""
    total, failed = items.counts()
    have = f"{failed} of its {total} items have: `shoal items {job} --failed`"
    if not failed:
        reason = f"no item of job {job} has failed"
    elif sound := items.not_failed(named):
        reason = f"item {next(iter(sound))} of job {job} has not failed; {have}"
    else:
        return
    raise JobRefused(reason, Refusal.COMPLETE)


def _ended_items(life: Life) -> Items:
    name, request = life.job.name, life.request
    if request is None:
        reason = f"job {name} ended under a coordinator that has not recorded where its results are"
        raise JobRefused(reason, Refusal.LACKING)
    stored = stored_followed_items if request.follow else stored_items
    try:
        items = stored(local_folder(request.outputs_uri, what="outputs"), name)
    except (LocationRefused, OSError) as error:
        reason = f"the items of job {name} cannot be read: {error}"
        raise JobRefused(reason, Refusal.LACKING) from error
    if items is None:
        reason = f"job {name} ended before its items were counted"
        raise JobRefused(reason, Refusal.LACKING)
    return items


def _item(listed: ListedItem, way: Active | None) -> pb.JobItem:
    item = pb.JobItem(item=listed.item, input=listed.input, state=pb.JobItem.WAITING)
    if (failure := listed.failure) is not None:
        item.state, item.reason = pb.JobItem.FAILED, failure.reason[:_TEXT]
        item.tries, item.device = failure.tries, failure.device
    elif listed.stored:
        item.state, item.tries = pb.JobItem.SUCCEEDED, listed.tries
    elif way is not None:
        item.state, item.tries, item.device = pb.JobItem.ACTIVE, way.tries, way.device
    return item


def _active(item: ActiveItem) -> Active:
    devices = [task.device.name for task in item.tasks if task.device is not None]
    return Active(1 + item.retries, devices[-1] if devices else "")
