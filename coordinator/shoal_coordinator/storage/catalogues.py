"""Which result files a job has to make, which of them are made, and which of its items failed."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from shoal_coordinator.storage.file_tables import FileTable
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.identity import Origins
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.journal import Journal, Line
from shoal_coordinator.storage.kept_results import JOURNAL, noted_sizes
from shoal_coordinator.storage.parts import ResultFile


class CatalogueFailed(OSError):
    """A catalogue's own file cannot be read or written."""


class Catalogue(ABC):
    """The result files of one job. `files` are those to make, by number. Every method may raise
    `CatalogueFailed`, or another `OSError`."""

    files: FileTable[ResultFile]
    origins: Origins | None = None
    """What the results depend on, where all files are known when the job begins."""

    def number(self, numbers: Sequence[int]) -> None:
        """Have the files have these numbers, in their order; before `open`."""
        self.files = FileTable(self.files.files, numbers)

    @abstractmethod
    def open(self, folder: Folder) -> Mapping[int, int]:
        """Begin, in the job's folder; the sizes of the files that are noted as made."""

    @abstractmethod
    def note(self, sizes: Mapping[int, int]) -> None:
        """These files are made: that is durable on return."""

    @abstractmethod
    def note_failed(self, numbers: Collection[int]) -> bool:
        """All items of these files have ended, and some of each failed. Whether the files are done
        with; otherwise the next run tries the failed items again."""

    @abstractmethod
    def correct(self, made: Mapping[int, int]) -> None:
        """Of the files that were noted, these are made."""

    @abstractmethod
    def fail(self, failures: Iterable[FailedItem]) -> None:
        """These items have failed for good."""

    @property
    @abstractmethod
    def failed(self) -> int:
        """How many items have failed."""

    @abstractmethod
    def failures(self, most: int) -> Sequence[FailedItem]:
        """The first of the items that failed, in their order."""

    @abstractmethod
    def close(self) -> None:
        """Release what `open` has opened."""


class FixedFiles(Catalogue):
    """Files that are all known when the job begins: a journal has a line for each that is made.
    Items that failed are tried again by the next run."""

    def __init__(self, files: Iterable[ResultFile], origins: Origins | None = None) -> None:
        self.files = FileTable(files)
        self.origins = origins
        self._failed: dict[int, FailedItem] = {}

    def open(self, folder: Folder) -> Mapping[int, int]:
        self._journal = Journal(folder, JOURNAL)
        noted = noted_sizes(self._journal)
        self._noted = {number: size for number, size in noted.items() if number in self.files}
        return self._noted

    def note(self, sizes: Mapping[int, int]) -> None:
        self._journal.append(_made_line(number, size) for number, size in sizes.items())

    def note_failed(self, numbers: Collection[int]) -> bool:
        return False

    def correct(self, made: Mapping[int, int]) -> None:
        if self._journal.damaged or made != self._noted:
            self._journal.rewrite(_made_line(*each) for each in sorted(made.items()))

    def fail(self, failures: Iterable[FailedItem]) -> None:
        self._failed |= {failure.item: failure for failure in failures}

    @property
    def failed(self) -> int:
        return len(self._failed)

    def failures(self, most: int) -> Sequence[FailedItem]:
        return [self._failed[item] for item in sorted(self._failed)[:most]]

    def close(self) -> None:
        self._journal.close()


def _made_line(number: int, size: int) -> Line:
    return {"file": number, "bytes": size}
