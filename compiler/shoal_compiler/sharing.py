"""Which weights several fragments share. Pure.

The same tensor may be used all over a model: by an encoder that runs one layer twelve times, as a
table of embeddings and the output layer. Weights that the same fragments use become one file, which
each of them lists; a store and a device have it once. A fragment lists few such files, the largest.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from shoal_protocol.manifest import MOST_SHARED_FILES

LEAST_BYTES: Final = 256 << 10
"""A smaller file is not worth its name: every fragment has its own copy."""


def shared_groups(uses: Sequence[Mapping[str, int]]) -> tuple[tuple[str, ...], ...]:
    """The weights of each file that fragments share, in the order of their first use. `uses` are
    the weights of each fragment with their bytes."""
    users: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, weights in enumerate(uses):
        for name, size in weights.items():
            users.setdefault(name, []).append(index)
            sizes[name] = size
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, indexes in users.items():
        if len(indexes) > 1:
            groups.setdefault(tuple(indexes), []).append(name)
    weighed = {among: sum(sizes[name] for name in names) for among, names in groups.items()}
    listed, taken = [0] * len(uses), set()
    for among in sorted(groups, key=lambda each: (-weighed[each], each)):
        if weighed[among] >= LEAST_BYTES and all(
            listed[index] < MOST_SHARED_FILES for index in among
        ):
            taken.add(among)
            for index in among:
                listed[index] += 1
    return tuple(tuple(names) for among, names in groups.items() if among in taken)
