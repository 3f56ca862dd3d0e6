"""Models of the examples on a warm pool, several items in one run."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import shoal
from parity_with_whole import whole
from python.pools import processes
from real_models import MODELS, find

pytestmark = pytest.mark.real


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["ppocr_rec", "minilm_l6"])
def test_items_give_the_same_at_once_as_alone_also_when_a_device_is_killed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, path = MODELS[name], find(name)
    different = [made.inputs(seed) for seed in range(8)]
    items = [each for each in different for _ in range(3)]
    expected = [each for each in whole(path, different) for _ in range(3)]
    with shoal.pool(devices=2, budget="128Mi") as pool:
        model = pool.load(path, shapes=made.shapes(), batching=8)
        for number, result in enumerate(model.map(items, look_ahead=24)):
            assert isinstance(result, dict)
            for output, value in expected[number].items():
                wanted = value.astype(np.float64)
                np.testing.assert_allclose(result[output], wanted, rtol=1e-3, atol=1e-4)
            if number == 4:
                os.kill(processes("shoal_agent")[0], signal.SIGKILL)
    assert number == 23


def test_a_number_of_items_that_makes_no_sense_is_refused_at_once(
    pool: shoal.Pool, folder: Path
) -> None:
    for wrong in (0, 1025):
        with pytest.raises(ValueError, match=f"batching={wrong} is no whole number from 1 to 1024"):
            pool.load(folder / "model.onnx", batching=wrong)
