"""Jobs that begin in one folder of outputs at the same time."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import OutputsRefused, ResultStore

JOBS = ("a", "b", "c", "d")


def test_of_jobs_that_begin_at_once_none_bars_the_folder_without_having_it(tmp_path: Path) -> None:
    refused = 0

    def begin(outputs: Path, job: str, barrier: Barrier) -> bool:
        files = FixedFiles([ResultFile("a.npz", 0, 1)])
        barrier.wait()
        with contextlib.suppress(OutputsRefused):
            store = ResultStore(outputs, job=job, identity="", catalogue=files, names=["y"])
            store.close()
            return True
        return False

    with ThreadPoolExecutor(len(JOBS)) as threads:
        for number in range(100):
            outputs, barrier = tmp_path / str(number), Barrier(len(JOBS))
            given = list(threads.map(lambda job: begin(outputs, job, barrier), JOBS))  # noqa: B023
            has_it = [job for job, had in zip(JOBS, given, strict=True) if had]
            assert [each.name for each in (outputs / ".shoal").iterdir()] == has_it
            refused += len(JOBS) - len(has_it)
    assert refused > 0
