"""A folder with a small model, inputs and manifests."""

from pathlib import Path

import pytest

from cli.local.workbench import Workbench, make_workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return make_workbench(tmp_path)
