"""A pool of the devices of a coordinator that runs elsewhere."""

from pathlib import Path

import onnxruntime
import pytest

import shoal
from python.pools import SHAPES, batch, check
from shoal_protocol.partition import document_from_json


@pytest.fixture
def target(pool: shoal.Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Of another program's coordinator, with three devices."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    assert pool._pool._run is not None
    (target,) = pool._pool._run.open_channel.args  # type: ignore[attr-defined]
    return str(target)


@pytest.mark.real
def test_a_model_runs_on_the_devices_of_a_coordinator(
    target: str, folder: Path, whole: onnxruntime.InferenceSession, tmp_path: Path
) -> None:
    with shoal.pool(coordinator=target, work=tmp_path / "work") as pool:
        model = pool.load(folder / "model.onnx", shapes=SHAPES, fragments=3)
        check(whole, batch(1), model.run({"x": batch(1)}))
        items = [batch(seed) for seed in range(20)]
        results = model.map({"x": item} for item in items)
        for item, result in zip(items, results, strict=True):
            check(whole, item, result)
    (cut,) = (tmp_path / "work" / "store" / "partitions").glob("*/partition.json")
    assert len(document_from_json(cut.read_bytes()).fragments) == 3


def test_a_coordinator_that_was_not_joined_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(shoal.PoolFailed, match="was not joined by this user"):
        shoal.pool(coordinator="shelf.local:7400")


def test_a_coordinators_devices_have_budgets_of_their_own() -> None:
    with pytest.raises(ValueError, match="have budgets of their own"):
        shoal.pool(coordinator="shelf.local:7400", budget="24Mi")
