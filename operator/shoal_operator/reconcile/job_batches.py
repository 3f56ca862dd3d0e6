"""Where a job's items run one by one, though it wants several at once (`spec.batching`). Pure."""

from collections.abc import Sequence
from typing import Final

from shoal_api.kinds.placement import StageStatus
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, Unreachable
from shoal_protocol.partition import PartitionDocument, items_within
from shoal_protocol.units import counted, format_bytes, listed

_NAMED: Final = 8


def one_by_one(
    snapshot: InferenceJobSnapshot, document: PartitionDocument, stages: Sequence[StageStatus]
) -> str:
    """What the condition of the plan says of that; empty where there is nothing to say."""
    batching = snapshot.job.spec.batching
    if batching is None or batching.max_items < 2:
        return ""
    return _where_they_meet(document) + _without_room(snapshot, document, stages)


def _where_they_meet(document: PartitionDocument) -> str:
    count = len(document.fragments)
    alone = [str(index) for index in range(count) if document.batch_item_bytes(index) is None]
    if not alone:
        return ""
    which = f"{len(alone)} of {counted(count, 'fragment')} ({listed(alone, _NAMED)})"
    return f"; items run one by one in {which}: they meet there, or may"


def _without_room(
    snapshot: InferenceJobSnapshot, document: PartitionDocument, stages: Sequence[StageStatus]
) -> str:
    """As far as budgets are known: a coordinator that does not answer says none."""
    view = snapshot.view
    connected = () if isinstance(view, Unreachable) else view.devices
    budgets = {each.name: each.budget_bytes for each in connected}
    found: dict[tuple[int, int, int], list[str]] = {}
    for stage in stages:
        for device in stage.devices:
            if device not in budgets:
                continue
            free = max(0, budgets[device] - _held(device, stage, document))
            for index in stage.fragments:
                more = document.batch_item_bytes(index)
                if more is not None and items_within(free, more, 2) < 2:
                    found.setdefault((index, more, free), []).append(device)
    places = [
        f"fragment {index} on {listed(devices, _NAMED)} (each more needs {format_bytes(more)}, "
        f"{format_bytes(free)} are free)"
        for (index, more, free), devices in found.items()
    ]
    return f"; items run one by one for want of room: {listed(places, _NAMED)}" if places else ""


def _held(device: str, stage: StageStatus, document: PartitionDocument) -> int:
    """What a device of a stage holds at once."""
    grants = {
        each.fragment: each.granted_bytes for each in stage.in_blocks if each.device == device
    }
    all_of_them = sum(
        grants.get(index, document.fragments[index].resident_bytes) for index in stage.fragments
    )
    return min(all_of_them, stage.resident_bytes)
