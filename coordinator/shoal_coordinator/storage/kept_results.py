"""Which files of a job have results in its folders, as an earlier run left them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Final

from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.journal import Journal
from shoal_coordinator.storage.result_log import log_name, log_sequences, read_log

JOURNAL: Final = "journal.jsonl"


def kept_results(
    folder: Folder, outputs: Folder, results: Mapping[int, str]
) -> Mapping[int, Sequence[str]]:
    """Of these files, whose results are called so, those that have one, or results of some of
    their items; by number, with the paths without which they have none. Raises `OSError`."""
    kept = defaultdict[int, list[str]](list)
    with closing(Journal(folder, JOURNAL)) as journal:
        noted = noted_sizes(journal)
    for number, size in noted.items():
        if number in results and outputs.size(results[number]) == size:
            kept[number].append(str(outputs.path / results[number]))
    for number, name in results.items():
        if folder.size(part := f"{number}.part"):
            kept[number].append(str(folder.path / part))
            if number not in noted and outputs.size(name) is not None:
                kept[number].append(str(outputs.path / name))
    for sequence in log_sequences(folder):
        for contents in read_log(folder, sequence):
            for number in contents.keys() & results.keys():
                kept[number].append(str(folder.path / log_name(sequence)))
    return kept


def noted_sizes(journal: Journal) -> dict[int, int]:
    """The sizes of the files that a journal says are made, by number."""
    sizes: dict[int, int] = {}
    for line in journal.lines:
        match line:
            case {"file": int(number), "bytes": int(size)}:
                sizes[number] = size
            case _:
                pass
    return sizes
