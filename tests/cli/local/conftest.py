"""A folder with a small model, inputs and manifests."""

from pathlib import Path

import pytest

from cli.local.workbench import Workbench, save_inputs, save_model


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120", "NO_COLOR": "1"}
    made = Workbench(folder=tmp_path, environment=environment)
    save_model(made.model)
    save_inputs(made.inputs, files=4)
    made.write_manifest()
    return made
