"""Whether weights leave the page cache once they were used, with a cache that loses what was read
longest ago."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_agent.memory.eviction import Eviction


class Cache:
    """Of so many blocks; the kernel's, which loses those that were read longest ago."""

    def __init__(self) -> None:
        self.size, self.blocks = 0, list[int]()
        self.reads = 0

    def use(self, block: int, *, leaves: bool) -> None:
        self.reads += block not in self.blocks
        self.blocks = [each for each in self.blocks if each != block] + [block]
        if leaves:
            self.blocks.remove(block)
        self.blocks = self.blocks[-self.size :] if self.size else []


def run(cache: Cache, eviction: Eviction, blocks: int) -> bool:
    leaves = eviction.next_run(cold=any(each not in cache.blocks for each in range(blocks)))
    for each in range(blocks):
        cache.use(each, leaves=leaves)
    return leaves


@given(st.integers(1, 6), st.integers(1, 6))
def test_what_has_room_stays_and_what_has_none_leaves_in_nearly_all_runs(
    blocks: int, size: int
) -> None:
    cache, eviction = Cache(), Eviction()
    cache.size = size
    left = sum(run(cache, eviction, blocks) for _ in range(500))
    assert left == 0 if size >= blocks else left > 450
    assert cache.reads == blocks if size >= blocks else cache.reads >= 450


@given(st.lists(st.integers(0, 6), max_size=6))
def test_room_that_comes_is_used_after_64_runs_at_most(sizes: list[int]) -> None:
    cache, eviction = Cache(), Eviction()
    for cache.size in sizes:
        for _ in range(200):
            run(cache, eviction, blocks=4)
    cache.size = 4
    for _ in range(66):
        run(cache, eviction, blocks=4)
    reads = cache.reads
    assert not any(run(cache, eviction, blocks=4) for _ in range(100))
    assert cache.reads == reads
