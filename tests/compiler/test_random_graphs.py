"""Random graphs, cut at random places, equal the whole."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaining import run_chained, run_whole
from random_graphs import WIDTH, models
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=models(), data=st.data())
def test_random_cuts_of_random_graphs_equal_the_whole(
    made: onnx.ModelProto, data: st.DataObject
) -> None:
    names = [each.name for each in made.graph.input]
    feeds = {
        name: np.random.default_rng(seed).uniform(-1, 1, (3, WIDTH)).astype(np.float32)
        for seed, name in enumerate(names)
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(made, path)
        wanted = run_whole(path, feeds)
        profile = profile_model(path, {name: value.shape for name, value in feeds.items()})
        layout = Layout(profile)
        most = min(4, len(layout.legal))
        chosen = st.lists(
            st.sampled_from(layout.legal or (0,)), min_size=most, max_size=most, unique=True
        )
        cuts = tuple(sorted(data.draw(chosen))) if most else ()
        document = cut_model(path, profile, cuts, Path(folder) / "store")
        got = run_chained(Path(folder) / "store", document, feeds)
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
