"""A disk that is full: where a model is cut, and where a device keeps its fragments."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.local.test_preparation import wide_order
from cli.local.workbench import Workbench, assert_results_are_the_whole_models
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


def test_a_run_says_which_device_had_no_disk_for_its_fragments(bench: Workbench) -> None:
    cache = bench.folder / "work" / "cache" / "two"
    with small_disk(cache, "64k"):
        command = ("run", bench.manifest, "--work", "work", "--report", bench.report)
        ran = bench.run(*command, "--progress", "plain")
    assert ran.status == 0, ran.err
    assert_results_are_the_whole_models(bench)
    notes = ran.report["notes"]
    assert isinstance(notes, list)
    (said,) = notes
    assert said.startswith("two ran nothing: it could not load fragment ")
    assert "cache/two/fragments is full: " in said
    assert said in ran.err.replace("\n", " ")
