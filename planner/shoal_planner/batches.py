"""How many items the devices of a plan can run at once, in what their fragments leave."""

from collections.abc import Iterator

from shoal_planner.outcome import Plan
from shoal_protocol.partition import PartitionDocument, items_within
from shoal_protocol.units import format_bytes


def batch_sentences(plan: Plan, document: PartitionDocument, most: int) -> Iterator[str]:
    """For each fragment, how many items its devices run at once where a job allows `most`."""
    if most < 2:
        return
    for stage in plan.stages:
        free = min(share.budget_bytes - share.resident_bytes for share in stage.shares)
        for index in stage.fragments:
            size = document.batch_item_bytes(index)
            if size is None:
                yield f"fragment {index} runs items one by one: they meet in it, or may"
            elif (items := items_within(free, size, most)) < 2:
                yield (
                    f"fragment {index} runs items one by one: each more needs "
                    f"{format_bytes(size)}, its devices have {format_bytes(free)}"
                )
            else:
                yield (
                    f"fragment {index} runs up to {items} items at once, each more in "
                    f"{format_bytes(size)}"
                )
