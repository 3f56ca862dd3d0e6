"""Text in results: NumPy writes it in fixed width, so one long element makes all of them long."""

from pathlib import Path

import numpy as np

from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore


def test_text_that_is_small_but_for_its_fixed_width_is_refused_alone(tmp_path: Path) -> None:
    file = ResultFile("lines.npz", 0, 2, stacked=True)
    store = ResultStore(
        tmp_path, job="job", identity="i", catalogue=FixedFiles([file]), names=["label"]
    )
    store.add(0, {"label": np.array(["text", ""], object)})
    bomb = np.array(["x" * 400_000] + [""] * 400_000, object)  # 2 MB, or 640 GB as NumPy has it
    store.add(1, {"label": bomb})
    failures = store.finish([0, 1])
    assert failures.keys() == {1}
    assert "of fixed width" in failures[1]
    assert store.completed() == {0}
    store.close()
