"""Names of the arrays of single rows, beside outputs of the model that are called alike."""

from contextlib import closing
from pathlib import Path

import numpy as np

from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.made_files import row_name
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore


def test_no_row_has_the_name_of_an_output(tmp_path: Path) -> None:
    catalogue = FixedFiles([ResultFile("a.npz", 0, 3, stacked=True)])
    names = ("y", "y.1", "y.x")
    with closing(
        ResultStore(tmp_path, job="job", identity="", catalogue=catalogue, names=names)
    ) as store:
        for row in range(3):
            y, own = np.full(row, row, np.float32), np.full(2, 10 + row, np.float32)
            store.add(row, {"y": y, "y.1": own, "y.x": own})
        assert store.finish(range(3)) == {}
    with np.load(tmp_path / "a.npz") as made:
        assert made.files == ["y..0", "y..1", "y..2", "y.1", "y.x"]
        assert [made[row_name("y", row, names)].tolist() for row in range(3)] == [[], [1], [2, 2]]
        assert made["y.1"].tolist() == [[10, 10], [11, 11], [12, 12]]


def test_a_row_has_a_dot_and_its_number_where_no_output_is_called_so() -> None:
    assert row_name("y", 3, ("y", "y.x", "z.3", "y.3x")) == "y.3"
