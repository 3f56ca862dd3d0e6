"""How many items a plan's devices run at once."""

from dataclasses import replace

import pytest

from fragment_pools import MIB, device, partition, placed
from shoal_planner.batches import batch_sentences
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective


@pytest.mark.parametrize(
    ("batches", "budget_mib", "says"),
    [
        (True, 60, "fragment 0 runs up to 4 items at once, each more in 11 MiB"),
        (True, 400, "fragment 0 runs up to 8 items at once, each more in 11 MiB"),
        (True, 25, "fragment 0 runs items one by one: each more needs 11 MiB, its devices have "),
        (False, 400, "fragment 0 runs items one by one: they meet in it, or may"),
    ],
)
def test_a_plan_says_how_many_items_run_at_once_in_what_fragments_leave(
    *, batches: bool, budget_mib: int, says: str
) -> None:
    document = partition([10**8], [20 * MIB], [MIB // 2, MIB // 2])
    document = replace(document, fragments=(replace(document.fragments[0], batches=batches),))
    answer = placed(plan(document, [device("pi", budget_mib * MIB)], Objective.THROUGHPUT))
    assert list(batch_sentences(answer, document, 1)) == []
    (sentence,) = batch_sentences(answer, document, 8)
    assert sentence.startswith(says)
