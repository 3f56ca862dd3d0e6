"""What is raised, wherever it goes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import shoal

RAISED = [
    shoal.ShoalError("what"),
    shoal.PoolFailed("what", device="pi-4"),
    shoal.PoolClosed(),
    shoal.ModelFailed("what", need=2, have=1, device="pi-4"),
    shoal.ItemFailed(3, "Budget", "what", need=2, have=1, device="pi-4"),
]


def pickled(error: shoal.ShoalError, protocol: int) -> Any:
    return pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - its own


WAYS: list[Callable[[shoal.ShoalError], Any]] = [
    copy.copy,
    *(lambda error, each=each: pickled(error, each) for each in range(6)),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_comes_whole_out_of_another_process(error: shoal.ShoalError) -> None:
    for way in WAYS:
        got = way(error)
        assert type(got) is type(error)
        assert (str(got), vars(got)) == (str(error), vars(error))
