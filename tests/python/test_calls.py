"""Calls of a model on a warm pool, for ordinary code."""

import copy
import os
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnxruntime
import pytest

import shoal
from python.pools import SHAPES, batch, check, processes
from shoal_coordinator.server.item_streams import MAXIMUM_STREAMS

pytestmark = pytest.mark.real

Session: TypeAlias = onnxruntime.InferenceSession


def test_a_call_gives_what_the_whole_model_gives(model: shoal.Model, whole: Session) -> None:
    for seed in range(3):
        x = batch(seed, rows=1 + seed)
        check(whole, x, model.run({"x": x}))


def test_results_come_in_the_order_of_the_inputs(model: shoal.Model, whole: Session) -> None:
    inputs = [batch(seed) for seed in range(50)]
    results = list(model.map({"x": x} for x in inputs))
    assert len(results) == 50
    for x, result in zip(inputs, results, strict=True):
        check(whole, x, result)


def test_a_program_may_fill_one_array_again_for_each_item(
    model: shoal.Model, whole: Session
) -> None:
    array = batch(0)

    def items() -> Iterator[dict[str, np.ndarray]]:
        for seed in range(40):
            array[:] = batch(seed)
            yield {"x": array}

    for seed, result in enumerate(model.map(items())):
        check(whole, batch(seed), result)


@pytest.mark.parametrize("wrong", [batch(0), [("x", batch(0))], None])
def test_an_item_that_is_no_dictionary_is_refused(model: shoal.Model, wrong: object) -> None:
    with pytest.raises(TypeError, match="a dictionary of arrays by the names"):
        model.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a dictionary of arrays by the names"):
        list(model.map([wrong]))  # type: ignore[list-item]


def test_what_numpy_takes_for_an_array_is_one(model: shoal.Model, whole: Session) -> None:
    with pytest.raises(shoal.ItemFailed, match="type float64 is not float32"):
        model.run({"x": batch(0).tolist()})
    with pytest.raises(shoal.ItemFailed, match="no tensors where x belong"):
        model.run({})
    check(whole, batch(0), model.run({"x": batch(0)}))


@pytest.mark.parametrize("look_ahead", [1, 5])
def test_no_more_items_are_taken_than_the_look_ahead(model: shoal.Model, look_ahead: int) -> None:
    taken = 0

    def items() -> Iterator[dict[str, np.ndarray]]:
        nonlocal taken
        for seed in range(12):
            taken += 1
            yield {"x": batch(seed)}

    for given, _ in enumerate(model.map(items(), look_ahead=look_ahead)):
        assert taken <= given + look_ahead


def test_threads_may_share_a_model(model: shoal.Model, whole: Session) -> None:
    inputs = [batch(seed) for seed in range(24)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda x: model.run({"x": x}), inputs))
    for x, result in zip(inputs, results, strict=True):
        check(whole, x, result)


def test_an_item_that_fails_is_named(model: shoal.Model, whole: Session) -> None:
    good = {"x": batch(0)}
    results = model.map([good, good, {"x": batch(0).astype(np.float64)}, good])
    check(whole, batch(0), next(results))
    check(whole, batch(0), next(results))
    with pytest.raises(shoal.ItemFailed, match=r"item 2: .* type float64 is not float32") as e:
        next(results)
    assert (e.value.item, e.value.kind) == (2, "InvalidInput")


def test_the_others_go_on_where_failures_are_returned(model: shoal.Model, whole: Session) -> None:
    good, bad = {"x": batch(0)}, {"z": batch(0)}
    results = list(model.map([bad, good, bad, good], on_error="return"))
    failed = [each for each in results if isinstance(each, shoal.ItemFailed)]
    assert [each.item for each in failed] == [0, 2]
    check(whole, batch(0), results[1])
    check(whole, batch(0), results[3])


def test_what_is_no_tensor_fails_before_it_is_sent(model: shoal.Model) -> None:
    with pytest.raises(shoal.ItemFailed, match="x"):
        model.run({"x": np.array([{}])})


def test_a_map_that_is_given_up_leaves_the_model_usable(model: shoal.Model, whole: Session) -> None:
    results = model.map({"x": batch(seed)} for seed in range(1000))
    check(whole, batch(0), next(results))
    del results
    check(whole, batch(7), model.run({"x": batch(7)}))


def test_who_sends_a_model_to_another_process_is_told_what_to_do(
    model: shoal.Model, pool: shoal.Pool
) -> None:
    for each in (model, model.run, pool, shoal.async_pool()):
        for way in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="has to start a pool and load a model itself"):
                way(each)


@pytest.mark.parametrize("program", ["shoal_coordinator", "shoal_agent"])
def test_a_process_that_is_killed_costs_no_result(
    model: shoal.Model, whole: Session, program: str
) -> None:
    inputs = [batch(seed) for seed in range(60)]
    for number, result in enumerate(model.map({"x": x} for x in inputs)):
        check(whole, inputs[number], result)
        if number == 20:
            os.kill(processes(program)[0], signal.SIGKILL)
    assert number == 59


@pytest.mark.parametrize("wrong", [{"look_ahead": 0}, {"on_error": "ignore"}])
def test_arguments_that_make_no_sense_are_refused_at_once(
    model: shoal.Model, wrong: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        model.map([], **wrong)  # type: ignore[arg-type]


def test_a_model_that_the_program_has_no_more_makes_room_for_others(
    pool: shoal.Pool, folder: Path, whole: Session
) -> None:
    for seed in range(MAXIMUM_STREAMS + 1):
        result = pool.load(folder / "model.onnx", shapes=SHAPES).run({"x": batch(seed)})
        check(whole, batch(seed), result)
    kept = [pool.load(folder / "model.onnx", shapes=SHAPES) for _ in range(3)]
    for each in kept:
        check(whole, batch(0), each.run({"x": batch(0)}))
