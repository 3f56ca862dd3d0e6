"""A disk that is full while a model is cut."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.local.test_preparation import wide_order
from made_models import deep
from shoal_cli.local.preparation import prepare
from shoal_cli.local.steps import StepRefused
from small_disk import small_disk


async def test_a_disk_that_is_full_is_named_with_what_to_do(tmp_path: Path) -> None:
    order = replace(wide_order(tmp_path), path=deep().save(tmp_path))
    store = tmp_path / "store"
    with small_disk(store, "1m"), pytest.raises(StepRefused) as refused:
        await prepare(order, store, lambda done, total: None)
    assert str(refused.value) == (
        f"wide cannot be cut into {store}: No space left on device; make room there, or give the "
        "run another folder with --work DIR"
    )
