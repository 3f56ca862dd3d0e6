"""The journal of a job, and the descriptor that it holds."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.journal import Journal


def test_a_journal_that_could_not_be_opened_again_closes_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Folder(tmp_path)) as folder:
        journal = Journal(folder, "journal.jsonl")
        opened = folder.open

        def fail(name: str, flags: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(folder, "open", fail)
        with pytest.raises(OSError, match="Too many open files"):
            journal.rewrite([{"file": 1, "bytes": 2}])
        other = os.open(tmp_path, os.O_RDONLY)  # gets the lowest number that is free
        journal.close()
        os.fstat(other)
        os.close(other)
        monkeypatch.setattr(folder, "open", opened)
        with closing(Journal(folder, "journal.jsonl")) as again:
            assert again.lines == [{"file": 1, "bytes": 2}]
