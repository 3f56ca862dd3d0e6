"""The items of a job as one message each: `ListItems`."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Final, NamedTuple

from shoal_coordinator.dispatch.state import Item as ActiveItem
from shoal_coordinator.jobs.values import Refusal
from shoal_coordinator.server.jobs import JobRefused
from shoal_coordinator.server.lives import Life
from shoal_coordinator.storage.item_list import ItemList, stored_items
from shoal_coordinator.storage.locations import LocationRefused, local_folder
from shoal_protocol.v1 import coordinator_pb2 as pb

PAGE: Final = 256
_AT_ONCE: Final = 4096
"""Items that are searched before others have their turn."""
_TEXT: Final = 1000
"""Characters of a reason."""


class NotListed(Exception):
    """The items of a job are not known; the text says why."""


class Active(NamedTuple):
    """An item on its way: which try it is, and the device of its newest task."""

    tries: int
    device: str


async def items_of(life: Life) -> tuple[ItemList, Mapping[int, Active]]:
    """How a job's items have ended, and which are active. Raises `NotListed`."""
    view, run, name = life.view(), life.run, life.job.name
    if life.request is not None and life.request.follow:
        raise NotListed(
            f"job {name} follows its inputs, so its items are not listed; those that failed are in "
            "failures.json beside its results"
        )
    if run is not None:
        active = {} if view is None else {n: _active(item) for n, item in view.active.items()}
        return await run.items(), active
    if not life.has_ended:
        raise NotListed(f"job {name} begins or ends just now; ask again in a moment")
    return await asyncio.to_thread(_ended_items, life), {}


async def pages(
    items: ItemList,
    active: Mapping[int, Active],
    states: Collection[pb.JobItem.State],
) -> AsyncIterator[pb.ItemPage]:
    """The items in these states, in their order; of none: all items."""
    page = pb.ItemPage()
    for number in range(items.total):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        item = _item(items, active, number)
        if states and item.state not in states:
            continue
        page.items.append(item)
        if len(page.items) == PAGE:
            yield page
            page = pb.ItemPage()
    if page.items:
        yield page


def require_failed(job: str, items: ItemList, named: Collection[int]) -> None:
    """Raises `JobRefused` where one of the items has not failed."""
    sound = sorted(frozenset(named) - items.failed.keys())
    if sound:
        reason = (
            f"item {sound[0]} of job {job} has not failed; "
            f"{len(items.failed)} of its {items.total} items have: `shoal items {job} --failed`"
        )
        raise JobRefused(reason, Refusal.COMPLETE)


def _ended_items(life: Life) -> ItemList:
    name, request = life.job.name, life.request
    if request is None:
        raise NotListed(
            f"job {name} ended under a coordinator that has not recorded where its results are"
        )
    try:
        items = stored_items(local_folder(request.outputs_uri, what="outputs"), name)
    except (LocationRefused, OSError) as error:
        raise NotListed(f"the items of job {name} cannot be read: {error}") from error
    if items is None:
        raise NotListed(f"job {name} ended before its items were counted")
    return items


def _item(items: ItemList, active: Mapping[int, Active], number: int) -> pb.JobItem:
    if (failed := items.failed.get(number)) is not None:
        return pb.JobItem(
            item=number,
            input=failed.input,
            state=pb.JobItem.FAILED,
            reason=failed.reason[:_TEXT],
            tries=failed.tries,
            device=failed.device,
        )
    place = items.place(number)
    if number in items.stored:
        tries = items.tries.get(number, 0)
        return pb.JobItem(item=number, input=place, state=pb.JobItem.SUCCEEDED, tries=tries)
    if (way := active.get(number)) is not None:
        return pb.JobItem(
            item=number,
            input=place,
            state=pb.JobItem.ACTIVE,
            tries=way.tries,
            device=way.device,
        )
    return pb.JobItem(item=number, input=place, state=pb.JobItem.WAITING)


def _active(item: ActiveItem) -> Active:
    devices = [task.device.name for task in item.tasks if task.device is not None]
    return Active(1 + item.retries, devices[-1] if devices else "")
