"""The replay of the runtime's arena: chunks never overlap, and what was touched stays touched."""

from hypothesis import example, given
from hypothesis import strategies as st

from shoal_planner.arena import TABLE_BYTES, Arena, Chunk, more_of_table_bytes
from shoal_protocol.arena_regions import MORE_THAN_BUDGET, REGION_BYTES, TABLE_SHARE

MIB = 1 << 20


@given(st.data())
def test_chunks_never_overlap_and_all_that_was_touched_counts(data: st.DataObject) -> None:
    arena = Arena()
    alive: list[Chunk] = []
    reached: dict[int, int] = {}
    largest = 0
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.integers(0, 1)) and alive:
            arena.release(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
            continue
        size = data.draw(st.sampled_from([1, 255, 4096, 64 << 10, MIB, 5 * MIB, 160 * MIB]))
        chunk = arena.allocate(size)
        assert chunk.size >= size
        for other in alive:
            apart = chunk.offset >= other.offset + other.size
            assert (
                chunk.region != other.region or apart or other.offset >= chunk.offset + chunk.size
            )
        alive.append(chunk)
        reached[chunk.region] = max(reached.get(chunk.region, 0), chunk.offset + chunk.size)
        largest = max(largest, sum(each.size for each in alive))
        touched = sum(reached.values())
        assert largest <= touched <= arena.total_bytes
        assert (arena.total_bytes > touched) == (max(reached) > 0), "only large regions have tables"


SIZES = st.sampled_from([0, 1, 4096, 70_000, MIB, 24 * MIB, 60 * MIB, 100 * MIB, 180 * MIB])


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=12), st.lists(SIZES, max_size=4))
@example(before=[(180 * MIB, True)], blocks=[24 * MIB])  # in a second region of one size
def test_blocks_touch_no_more_than_they_are_said_to(
    before: list[tuple[int, bool]], blocks: list[int]
) -> None:
    arena = Arena()
    held = [(arena.allocate(size), stays) for size, stays in before]
    for chunk, stays in held:
        if not stays:
            arena.release(chunk)
    touched, most = arena.total_bytes, arena.most_bytes(tuple(blocks))
    for size in filter(None, blocks):
        arena.allocate(size)
    assert most is None or arena.total_bytes - touched <= most
    assert most is not None or sum(blocks) > MIB, "it is known for what is little"


def test_the_smallest_free_chunk_is_taken_though_it_was_never_touched() -> None:
    arena = Arena()
    low, border = arena.allocate(60 * MIB), arena.allocate(4 * MIB)
    arena.release(low)  # 60 MiB are free below, and 32 MiB at the end of the region
    assert arena.allocate(16 * MIB).offset == border.offset + border.size
    assert arena.total_bytes == 80 * MIB + TABLE_BYTES


def test_regions_of_one_size_may_change_places_from_item_to_item() -> None:
    arena = Arena()
    first, second = arena.allocate(180 * MIB), arena.allocate(24 * MIB)
    assert (first.region, second.region) == (1, 2)
    assert arena.total_bytes == (180 + 180 + 6 + 6) * MIB


def test_what_is_small_lies_in_the_region_of_the_idle_agent() -> None:
    arena = Arena()
    arena.allocate(4096)
    assert arena.total_bytes == 4096


def test_each_region_is_twice_as_large_as_the_one_before_or_as_large_as_needed() -> None:
    arena = Arena()
    regions = [arena.allocate(size * MIB).region for size in (90, 90, 90, 600, 150)]
    # Regions of 96, 192 and 768 MiB; the second and the third have room for two.
    assert regions == [1, 2, 2, 3, 3]
    freed = Arena()
    chunks = [freed.allocate(10 * MIB) for _ in range(3)]
    for chunk in chunks:
        freed.release(chunk)
    assert freed.allocate(30 * MIB).region == 1, "freed neighbours did not join"
    assert freed.total_bytes == 30 * MIB + TABLE_BYTES


@given(st.integers(0, 512 * MIB), st.integers(0, 64 * MIB))
def test_a_device_has_room_for_the_table_that_its_budget_asks_for(need: int, more: int) -> None:
    resident = need + TABLE_BYTES
    budget = resident + more_of_table_bytes(resident) + more
    region = min(budget + budget // MORE_THAN_BUDGET, REGION_BYTES)
    assert need + region // TABLE_SHARE <= budget + 1
