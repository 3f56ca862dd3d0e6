"""The same in an event loop."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import shoal
from python.pools import SHAPES, batch, check, processes

pytestmark = pytest.mark.real


async def items() -> AsyncIterator[dict[str, np.ndarray]]:
    for seed in range(20):
        await asyncio.sleep(0)
        yield {"x": batch(seed)}


async def reusing(array: np.ndarray) -> AsyncIterator[dict[str, np.ndarray]]:
    for seed in range(20):
        array[:] = batch(seed)
        yield {"x": array}


async def test_calls_run_at_the_same_time_and_a_map_takes_what_comes(
    folder: Path, whole: onnxruntime.InferenceSession
) -> None:
    before = processes()
    async with shoal.async_pool(devices=2, budget="4Mi") as pool:
        model = await pool.load(folder / "model.onnx", shapes=SHAPES)
        results = await asyncio.gather(*(model.run({"x": batch(seed)}) for seed in range(5)))
        for seed, result in enumerate(results):
            check(whole, batch(seed), result)
        mapped = [result async for result in model.map(items(), look_ahead=4)]
        assert len(mapped) == 20
        for seed, made in enumerate(mapped):
            check(whole, batch(seed), made)
        reused = [result async for result in model.map(reusing(batch(0)))]
        for seed, made in enumerate(reused):
            check(whole, batch(seed), made)
        call = asyncio.create_task(model.run({"x": batch(0)}))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        check(whole, batch(1), await model.run({"x": batch(1)}))
    assert processes() == before


async def test_calls_under_way_fail_when_the_pool_is_closed(folder: Path) -> None:
    async with shoal.async_pool(devices=1, budget="8Mi") as pool:
        model = await pool.load(folder / "model.onnx", shapes=SHAPES)
        calls = [asyncio.create_task(model.run({"x": batch(seed)})) for seed in range(100)]
        await asyncio.sleep(0)
    ended = await asyncio.gather(*calls, return_exceptions=True)
    failed = [each for each in ended if not isinstance(each, dict)]
    assert failed
    assert all(isinstance(each, shoal.PoolClosed) for each in failed)


async def test_a_pool_that_has_not_begun_says_how_it_does(folder: Path) -> None:
    pool = shoal.async_pool(devices=1, budget="8Mi")
    with pytest.raises(shoal.PoolFailed, match="it runs from `async with` to its end") as caught:
        await pool.load(folder / "model.onnx")
    assert not isinstance(caught.value, shoal.PoolClosed)
    await pool.close()
