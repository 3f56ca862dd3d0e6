"""Sets of items that take the room of their holes, not of their items."""

import itertools
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.dispatch.machine import Limits, new_state, step
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

MILLIONS = 10_000_000
numbers = st.frozensets(st.integers(0, 40))
runs = st.lists(st.builds(range, st.integers(0, 40), st.integers(0, 40)))


@given(numbers, runs, numbers, st.integers(0, 45), st.integers(0, 45))
def test_a_set_of_items_is_the_set_of_their_numbers(
    items: frozenset[int], ranges: list[range], others: frozenset[int], first: int, end: int
) -> None:
    found = ItemSet(items, runs=ranges)
    plain = items.union(*ranges)
    assert found == plain
    assert list(found) == sorted(plain)
    assert len(found) == len(plain)
    assert {number for number in range(-1, 50) if number in found} == plain
    assert found.plus(others) == found.plus(ItemSet(others)) == plain | others
    assert others - found == others - plain
    assert found.within(range(first, end)) == {each for each in plain if first <= each < end}
    assert found.next_absent(first) == min(set(range(first, 100)) - plain)
    joined = list(found.runs())
    assert all(one.stop < other.start for one, other in itertools.pairwise(joined))


def test_a_job_goes_on_after_ten_million_results_in_next_to_no_memory() -> None:
    done = ItemSet(runs=[range(MILLIONS // 2), range(MILLIONS // 2 + 1, MILLIONS)])
    stage = ev.Stage(
        digest=Digest("sha256:" + 64 * "0"),
        resident_bytes=Bytes(1),
        least_bytes=Bytes(1),
        predecessors=(),
        takes_model_inputs=True,
        gives_results=True,
    )
    spec = ev.JobSpec(name="job", stages=(stage,), items=MILLIONS + 1, epoch=1)
    state = new_state(Limits())
    tracemalloc.start()
    try:
        step(state, ev.JobSubmitted(at=Nanoseconds(0), job=spec, completed=done))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    job = state.jobs["job"]
    assert sorted(job.active) == [MILLIONS // 2, MILLIONS]
    assert job.open == 2
    assert peak_bytes < 1 << 20
