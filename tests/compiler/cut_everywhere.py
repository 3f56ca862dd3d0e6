"""A model cut at every position, one by one and at all of them, beside the whole model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chaining import Tensors, run_chained, run_whole
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout


def assert_same_as_whole(path: Path, planned: Tensors, others: Sequence[Tensors] = ()) -> None:
    """The fragments, made for an item like `planned`, give the same to the bit of it and others."""
    profile = profile_model(path, {name: value.shape for name, value in planned.items()})
    legal = Layout(profile).legal
    store = path.parent / "store"
    for cuts in [(), *((position,) for position in legal), legal]:
        document = cut_model(path, profile, cuts, store)
        for feeds in (planned, *others):
            wanted, got = run_whole(path, feeds), run_chained(store, document, feeds)
            assert sorted(got) == sorted(wanted)
            for name, value in wanted.items():
                assert got[name].dtype == value.dtype
                np.testing.assert_array_equal(got[name], value, err_msg=name)
