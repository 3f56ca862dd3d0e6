"""Rows of tables that an agent reads from the files of a fragment, where it runs in blocks."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from agent.conftest import Joined
from agent.scripted_coordinator import ScriptedCoordinator
from agent.test_running import edge, task
from chaining import run_whole
from made_models import Recommender
from shoal_agent.runtime.described import read_blocks
from shoal_agent.runtime.failures import RuntimeFailed, Stopper, Terminated
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.table_rows import Table, TableRows, read_rows
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_protocol.blocks import Gathered
from shoal_protocol.digests import hexadecimal
from shoal_protocol.manifest import MANIFEST, WEIGHTS, FragmentDamaged
from shoal_protocol.partition import Fragment
from shoal_protocol.row_readers import ELEMENTS
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
ELEMENT = ELEMENTS["float"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, np.ndarray[Any, Any]]:
    """One somewhere in a file, and what it holds."""
    element = draw(st.sampled_from(list(ELEMENTS.values())))
    shape = draw(arrays.array_shapes(max_dims=4, max_side=9))
    content = np.frombuffer(
        np.random.default_rng(draw(st.integers(0, 99))).bytes(64 * int(np.prod(shape))),
        np.dtype(element.code).newbyteorder("=") if element.code != "?" else np.uint8,
    )[: int(np.prod(shape))]
    values = (content % 2 == 0) if element.code == "?" else content
    return Table("t", draw(st.integers(0, 5000)), element, shape), values.reshape(shape)


@settings(deadline=None, max_examples=200)
@given(made=tables(), data=st.data())
def test_what_is_read_is_what_numpy_takes(
    tmp_path_factory: pytest.TempPathFactory,
    made: tuple[Table, np.ndarray[Any, Any]],
    data: st.DataObject,
) -> None:
    table, values = made
    count = table.shape[0]
    indices = data.draw(
        arrays.arrays(
            data.draw(st.sampled_from([np.int32, np.int64])),
            data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12)),
            elements=st.integers(-count, count - 1),
        )
    )
    path = tmp_path_factory.mktemp("table") / "t"
    path.write_bytes(b"?" * table.offset + values.tobytes())
    file = os.open(path, os.O_RDONLY)
    try:
        rows = read_rows(file, table, indices, Stopper())
    finally:
        os.close(file)
    wanted = np.take(values, indices, axis=0)
    assert (rows.shape, rows.dtype) == (wanted.shape, wanted.dtype)
    assert rows.tobytes() == wanted.tobytes()


@pytest.fixture
def numbered(tmp_path: Path) -> tuple[Path, Table]:
    """20,000 rows, each with its number."""
    np.arange(20_000, dtype=np.float32).repeat(4).tofile(tmp_path / WEIGHTS)
    return tmp_path, Table(WEIGHTS, 0, ELEMENT, (20_000, 4))


def rows_of(place: tuple[Path, Table], indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    folder, table = place
    with (folder / table.file).open("rb") as file:
        return read_rows(file.fileno(), table, indices, Stopper())


def test_many_rows_side_by_side_and_many_times_the_same_are_read(
    numbered: tuple[Path, Table],
) -> None:
    chance = np.random.default_rng(0)
    for indices in (
        np.arange(20_000),
        np.arange(20_000)[::-1],
        np.full(9_000, 19_999),
        chance.integers(-20_000, 20_000, 50_000),
    ):
        assert np.array_equal(rows_of(numbered, indices)[:, 3], indices % 20_000)


@pytest.mark.parametrize("wrong", [20_000, -20_001])
def test_an_index_beyond_the_table_is_said_as_the_runtime_says_it(
    numbered: tuple[Path, Table], wrong: int
) -> None:
    with pytest.raises(RuntimeFailed, match=rf"out of data bounds, idx={wrong} must be within"):
        rows_of(numbered, np.array([0, wrong]))


def test_a_file_that_has_become_shorter_is_no_end_of_the_process(
    numbered: tuple[Path, Table],
) -> None:
    os.truncate(numbered[0] / WEIGHTS, 1000 * 16 + 8)
    assert rows_of(numbered, np.array([999]))[0, 0] == 999
    with pytest.raises(RuntimeFailed, match=r"weights\.bin ends within a table"):
        rows_of(numbered, np.array([1000]))
    with pytest.raises(FragmentDamaged, match="ends within a table"):
        TableRows(numbered[0], {"t": numbered[1]})


def test_a_run_that_is_stopped_reads_no_more(numbered: tuple[Path, Table]) -> None:
    stopper = Stopper()
    stopper.stop()
    with (numbered[0] / WEIGHTS).open("rb") as file, pytest.raises(Terminated):
        read_rows(file.fileno(), numbered[1], np.arange(9), stopper)


def test_what_rows_will_take_is_known_before_they_are_read(numbered: tuple[Path, Table]) -> None:
    rows = TableRows(numbered[0], {"t": numbered[1]})
    known = Gathered(table="t", indices="i", rows="r")
    later = Gathered(table="t", indices="computed", rows="s")
    shaped = rows.shaped({"i": np.zeros((3, 5), np.int64)}, (known, later))
    assert {name: each.nbytes for name, each in shaped.items()} == {"r": 3 * 5 * 16}


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "int4"), ("shape", []), ("shape", [1 << 30]), ("offset", -1), ("file", "other.bin")],
)
def test_a_table_that_is_not_in_its_file_damages_a_fragment(
    tmp_path: Path, key: str, value: object
) -> None:
    fragment, _ = cut(tmp_path, Recommender(tables=1, rows=16384))
    folder = tmp_path / "fragments" / hexadecimal(fragment.digest)
    assert read_blocks(folder) is not None
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["initializers"]["table0"][key] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(FragmentDamaged, match="describes no blocks"):
        read_blocks(folder)


# ---- fragments -----------------------------------------------------------------------------------


def cut(store: Path, made: Recommender) -> tuple[Fragment, Path]:
    """As one fragment, and the model's file."""
    path = store / "recommender.onnx"
    store.mkdir(exist_ok=True)
    onnx.save(made.proto(), path)
    (fragment,) = cut_model(path, profile_model(path), (), store).fragments
    return fragment, path


KINDS = [
    pytest.param(Recommender(), id="floats"),
    pytest.param(Recommender(together=True), id="indices of one input"),
    pytest.param(Recommender(dtype=np.float16), id="halves"),
    pytest.param(Recommender(dtype=np.int8, width=256, together=True), id="integers"),
]


@pytest.mark.parametrize("made", KINDS)
def test_in_blocks_a_recommender_gives_what_it_gives_as_a_whole(
    tmp_path: Path, made: Recommender
) -> None:
    fragment, _ = cut(tmp_path, made)
    folder = tmp_path / "fragments" / hexadecimal(fragment.digest)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    runtime.open("whole", folder)
    runtime.open("blocks", folder, fragment.least_bytes)
    for seed in range(3):
        item = made.item(seed)
        whole, blocks = (runtime.run(each, item, Stopper()).outputs for each in ("whole", "blocks"))
        assert blocks["y"].tobytes() == whole["y"].tobytes()


@pytest.mark.parametrize("made", KINDS)
async def test_a_recommender_runs_in_a_small_part_of_its_tables(
    coordinator: ScriptedCoordinator, join: Join, made: Recommender
) -> None:
    fragment, path = cut(coordinator.store, made)
    assert fragment.least_bytes < 8 * MIB < 20 * MIB < fragment.resident_bytes
    joined = await join(budget=str(fragment.least_bytes))
    reply = await joined.device.load(fragment.digest, fragment.least_bytes)
    assert reply.HasField("loaded"), reply
    assert "tried again" not in joined.agent.errors.read_text()
    names = list(made.item())
    for number in range(4):
        item = made.item(number)
        await joined.device.give(edge(-1, 0, number), item)
        execute = pb.Execute(
            task=task(0, number),
            digest=fragment.digest,
            inputs=[pb.InputSource(producer=-1, tensors=names)],
            results=["y"],
        )
        reply = await joined.device.ask("execute", execute)
        assert reply.HasField("executed"), reply
        assert reply.executed.peak_bytes <= fragment.least_bytes
        output = (await joined.device.result()).tensors["y"]
        # Its layers are laid out anew, and add in another order.
        wanted = run_whole(path, item)["y"].astype(float)
        np.testing.assert_allclose(output.astype(float), wanted, rtol=1e-5)
    telemetry = await joined.device.telemetry.get()
    assert telemetry.peak_bytes <= fragment.least_bytes
