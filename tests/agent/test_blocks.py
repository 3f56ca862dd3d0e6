"""Fragments in ONNX Runtime, block after block: what they compute, and which pages stay."""

import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from onnxruntime import InferenceSession

from agent.fragment_making import (
    InBlocks,
    MadeFragment,
    dense_model,
    slow_model,
    table_model,
    write_fragment,
)
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.runtime.blocks import Blocks, GrantTooSmall
from shoal_agent.runtime.described import read_blocks
from shoal_agent.runtime.destinations import Destinations
from shoal_agent.runtime.failures import RuntimeFailed, Stopper, Terminated
from shoal_agent.runtime.inputs import InputMismatch
from shoal_agent.runtime.mapped_pages import (
    PageRange,
    added,
    are_cold,
    beyond,
    drop,
    mapped_ranges,
    populate,
)
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import Opened, PreparedModel
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_protocol.blocks import Block
from shoal_protocol.manifest import FragmentDamaged

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)


@pytest.fixture
def made(tmp_path: Path) -> MadeFragment:
    """Eight weights of 1 MiB, in eight blocks."""
    return write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))


def resident(folder: Path) -> tuple[int, int]:
    """Bytes of a fragment's weights in this process's memory, and of those that are its own."""
    text = Path("/proc/self/smaps").read_text()
    of_weights = re.findall(rf"{folder}/weights\.bin\n((?:[A-Z].*\n)*)", text)
    found = [
        sum(int(size) for each in of_weights for size in re.findall(rf"\b{field}: +(\d+)", each))
        for field in ("Rss", "Anonymous")
    ]
    return found[0] << 10, found[1] << 10


X = {"x": np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)}


def expected(runtime: Runtime, made: MadeFragment) -> np.ndarray:
    """What the fragment computes as a whole."""
    runtime.open("whole", made.folder)
    result = runtime.run("whole", X, Stopper())
    runtime.close("whole")
    return result.outputs["y"]


@pytest.mark.parametrize("beyond_least", [0, 1000, MIB, 5 * MIB // 2, 6 * MIB])
def test_blocks_compute_what_the_whole_does_and_keep_what_they_were_granted(
    runtime: Runtime, made: MadeFragment, beyond_least: int
) -> None:
    whole = expected(runtime, made)
    granted = made.least_bytes + beyond_least
    assert runtime.open("f", made.folder, granted)[0].granted == made.least_bytes
    for _ in range(3):
        result = runtime.run("f", X, Stopper())
        assert np.array_equal(result.outputs["y"], whole)
        kept, own = resident(made.folder)
        assert result.streamed_bytes == 8 * MIB - kept
        # Of one block 1 MiB is reckoned while it runs; of what is granted beyond that, no more is
        # left than would keep another block.
        assert min(beyond_least, 7 * MIB) - MIB < kept <= beyond_least + MIB
        assert own == 0


def test_after_each_run_nothing_is_resident_where_nothing_may_be_kept(
    runtime: Runtime, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    runtime.open("f", made.folder, made.least_bytes)
    for _ in range(3):
        runtime.run("f", X, Stopper())
        assert resident(made.folder) == (0, 0)


def test_a_grant_of_all_runs_whole_and_one_too_small_not_at_all(
    runtime: Runtime, made: MadeFragment
) -> None:
    with pytest.raises(GrantTooSmall) as raised:
        runtime.open("f", made.folder, made.least_bytes - 1)
    need, have = raised.value.need_bytes, raised.value.have_bytes
    assert (need, have) == (made.least_bytes, made.least_bytes - 1)
    runtime.open("f", made.folder, made.resident_bytes)
    assert runtime.run("f", X, Stopper()).streamed_bytes == 0
    assert resident(made.folder) == (8 * MIB, 0)


def test_a_new_grant_is_followed_at_once(runtime: Runtime, made: MadeFragment) -> None:
    whole = expected(runtime, made)
    runtime.open("f", made.folder, made.resident_bytes)
    for granted in np.random.default_rng(1).integers(made.least_bytes, 12 * MIB, 30):
        runtime.run("f", X, Stopper())
        runtime.grant("f", int(granted))
        assert resident(made.folder)[0] <= max(0, granted - made.least_bytes + MIB)
        assert np.array_equal(runtime.run("f", X, Stopper()).outputs["y"], whole)
    runtime.grant("f", made.resident_bytes)
    runtime.run("f", X, Stopper())
    assert resident(made.folder) == (8 * MIB, 0)


def test_after_close_nothing_is_mapped(runtime: Runtime, made: MadeFragment) -> None:
    runtime.open("f", made.folder, made.least_bytes)
    runtime.run("f", X, Stopper())
    assert mapped_ranges(made.folder.resolve())
    runtime.close("f")
    assert mapped_ranges(made.folder.resolve()) == []


def make_cold(made: MadeFragment) -> None:
    """Drop a fragment's weights from memory and from the page cache."""
    drop(mapped_ranges(made.folder.resolve()))
    with (made.folder / "weights.bin").open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_is_prefetched_from_the_disk_is_not_kept(runtime: Runtime, made: MadeFragment) -> None:
    whole = expected(runtime, made)
    runtime.open("f", made.folder, made.least_bytes + 3 * MIB)
    runtime.run("f", X, Stopper())
    warm, _ = resident(made.folder)
    make_cold(made)
    if not are_cold(mapped_ranges(made.folder.resolve())):
        pytest.skip("this file system does not drop its page cache")
    for _ in range(2):
        assert np.array_equal(runtime.run("f", X, Stopper()).outputs["y"], whole)
        cold, _ = resident(made.folder)
        # Two blocks stream at once in the same grant.
        assert 0 < cold < warm
        make_cold(made)
    drop(mapped_ranges(made.folder.resolve()))
    populate(mapped_ranges(made.folder.resolve()))
    runtime.run("f", X, Stopper())
    # Less where a huge page, which the cache may have now, lies over the border of what is kept.
    kept, anonymous = resident(made.folder)
    assert 0 < kept <= warm
    assert anonymous == 0


class StopsBefore(Stopper):
    """Stops a run when it has been asked so often whether it is stopped."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    @property
    def stopped(self) -> bool:
        self.times -= 1
        return self.times < 0


def test_a_run_is_stopped_between_blocks_and_leaves_nothing_in_memory(
    runtime: Runtime, made: MadeFragment
) -> None:
    runtime.open("f", made.folder, made.least_bytes)
    with pytest.raises(Terminated, match="between two of its blocks"):
        runtime.run("f", X, StopsBefore(4))
    assert resident(made.folder) == (0, 0)
    runtime.run("f", X, Stopper())


def loop_model(rounds: int) -> ModelProto:
    """Relu, then a matrix product, then `rounds` of it."""
    model = slow_model(rounds)
    loop = model.graph.node.pop()
    loop.input[2] = "multiplied once"
    relu = helper.make_node("Relu", ["x"], ["positive"])
    product = helper.make_node("MatMul", ["positive", "w"], ["multiplied once"])
    model.graph.node.extend([relu, product, loop])
    return model


def test_a_run_is_stopped_inside_a_block(runtime: Runtime, tmp_path: Path) -> None:
    made = write_fragment(tmp_path, loop_model(1_000_000), 16 * MIB, InBlocks(2))
    runtime.open("f", made.folder, made.least_bytes)
    stopper = Stopper()
    timer = threading.Timer(0.2, stopper.stop)
    timer.start()
    with pytest.raises(Terminated, match=r"in its (MatMul|Loop) node"):
        runtime.run("f", {"x": np.ones((256, 256), np.float32)}, stopper)
    timer.join()


def test_inputs_are_checked_as_for_a_whole_fragment(runtime: Runtime, made: MadeFragment) -> None:
    runtime.open("f", made.folder, made.least_bytes)
    with pytest.raises(InputMismatch, match="input x: shape \\[3,4\\] does not fit"):
        runtime.run("f", {"x": np.ones((3, 4), np.float32)}, Stopper())
    with pytest.raises(InputMismatch, match="input x is missing"):
        runtime.run("f", {}, Stopper())


def test_a_value_that_is_output_and_input_of_later_blocks_stays(
    runtime: Runtime, tmp_path: Path
) -> None:
    model = dense_model([512] * 5)
    shape = helper.make_tensor_value_info("r0", TensorProto.FLOAT, ["batch", 512])
    model.graph.output.append(shape)
    made = write_fragment(tmp_path, model, 16 * MIB, InBlocks(4))
    runtime.open("whole", made.folder)
    runtime.open("f", made.folder, made.least_bytes)
    read_only = np.asfortranarray(X["x"])
    read_only.setflags(write=False)
    outputs = [runtime.run(each, {"x": read_only}, Stopper()).outputs for each in ("whole", "f")]
    assert list(outputs[0]) == list(outputs[1]) == ["y", "r0"]
    assert all(np.array_equal(outputs[0][name], outputs[1][name]) for name in ("y", "r0"))


LARGE = {"x": np.random.default_rng(0).standard_normal((600, 512), dtype=np.float32)}
"""So many rows that the output has more than `OUTSIDE_BYTES`."""


def test_large_outputs_of_several_runs_are_arrays_of_their_own(
    runtime: Runtime, made: MadeFragment
) -> None:
    runtime.open("whole", made.folder)
    runtime.open("f", made.folder, made.least_bytes)
    # The first run of a whole shows that it gives large outputs, and the others place them.
    whole, again, _ = (runtime.run("whole", LARGE, Stopper()).outputs["y"] for _ in range(3))
    assert np.array_equal(whole, again)
    first = runtime.run("f", LARGE, Stopper()).outputs["y"]
    second = runtime.run("f", {"x": -LARGE["x"]}, Stopper()).outputs["y"]
    assert np.array_equal(first, whole)
    assert not np.array_equal(first, second)
    assert np.array_equal(runtime.run("f", X, Stopper()).outputs["y"], expected(runtime, made))


def test_a_large_output_whose_shape_is_not_what_the_model_says_is_right(
    runtime: Runtime, tmp_path: Path
) -> None:
    """And so is one that an earlier block has written in its place."""
    model = dense_model([512] * 3)
    early = helper.make_tensor_value_info("r0", TensorProto.FLOAT, ["batch", 512])
    model.graph.output.append(early)
    model.graph.node[-1].output[0] = "once"
    model.graph.node.append(helper.make_node("Concat", ["once", "once"], ["y"], axis=0))
    made = write_fragment(tmp_path, model, 16 * MIB, InBlocks(2))
    runtime.open("whole", made.folder)
    runtime.open("f", made.folder, made.least_bytes)
    whole = runtime.run("whole", LARGE, Stopper()).outputs
    assert whole["y"].shape == (1200, 512)
    for _ in range(2):
        for fragment in ("whole", "f"):
            outputs = runtime.run(fragment, LARGE, Stopper()).outputs
            assert all(np.array_equal(outputs[name], whole[name]) for name in ("y", "r0"))


def test_the_place_of_an_output_is_known_where_its_sizes_are(tmp_path: Path) -> None:
    def places(*axes: int | str) -> list[tuple[int, ...]]:
        model = dense_model([512, 512])
        axis = model.graph.output[0].type.tensor_type.shape
        del axis.dim[:]
        for each in axes:
            axis.dim.add(**({"dim_value": each} if isinstance(each, int) else {"dim_param": each}))
        model.graph.input.append(
            helper.make_tensor_value_info("other", TensorProto.FLOAT, ["a", "a", "rows"])
        )
        session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        feed = LARGE | {"other": np.zeros((2, 3, 4), np.float32)}
        found = Destinations([session], [each.name for each in session.get_outputs()]).of(feed)
        return [array.shape for array in found.values()]

    assert places("batch", 512) == [(600, 512)]
    assert places("nobody knows", 512) == []
    assert places("a", 512) == []  # two axes that differ
    assert places("rows", 512) == []  # small


def test_what_a_prepared_block_holds_has_the_room_that_others_do_not_take() -> None:
    def prepared(*anonymous: int) -> list[PreparedModel]:
        none = Opened(opening_bytes=0, anonymous_bytes=0, growth_bytes=0)
        return [
            PreparedModel(
                model=Path("model.onnx"),
                weights=Path("weights.bin"),
                reads_rows=False,
                packed=Opened(opening_bytes=0, anonymous_bytes=each, growth_bytes=each),
                unpacked=none,
            )
            for each in anonymous
        ]

    block = Block(
        model_offset=0,
        model_bytes=1,
        takes=(),
        gives=(),
        held_bytes=320 << 10,
        weight_bytes=MIB,
        working_bytes=MIB,
    )
    source = Blocks(folder=Path(), resident_bytes=64 * MIB, outputs=(), blocks=(block,) * 4)
    granted = source.least_bytes
    # A session takes 200 KiB of the 320 when it is opened; each block has 32 to spare.
    assert source.with_prepared(prepared(328 << 10, 0, 0, 0), granted).prepared
    assert not source.with_prepared(prepared(329 << 10, 0, 0, 0), granted).prepared
    assert not source.with_prepared(prepared(*[233 << 10] * 4), granted).prepared
    assert source.with_prepared(prepared(*[233 << 10] * 4), granted + (4 << 10)).prepared


def test_sessions_of_blocks_have_no_more_threads_than_the_grant_has_room_for(
    made: MadeFragment,
) -> None:
    source = read_blocks(made.folder)
    assert source is not None
    least, each = source.least_bytes, len(source.blocks) * (112 << 10)
    assert source.with_threads(1, least) == (source, 1)
    assert source.with_threads(8, least) == (source, 2)
    more, threads = source.with_threads(8, least + 3 * each)
    assert (more.least_bytes, threads) == (least + 3 * each, 5)
    more, threads = source.with_threads(8, 2 * least + 100 * each)
    assert (more.least_bytes, threads) == (least + 6 * each, 8)


def test_text_is_refused_when_the_blocks_are_opened(runtime: Runtime, tmp_path: Path) -> None:
    number, text = TensorProto.FLOAT, TensorProto.STRING
    nodes = [("Cast", "x", "number"), ("Relu", "number", "positive"), ("Cast", "positive", "y")]
    made = [helper.make_node(kind, [taken], [given]) for kind, taken, given in nodes]
    for node, kind in ((made[0], number), (made[2], text)):
        node.attribute.append(helper.make_attribute("to", kind))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(made, "text", [value("x", text, [2])], [value("y", text, [2])])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    fragment = write_fragment(tmp_path, model, 16 * MIB, InBlocks(3))
    with pytest.raises(RuntimeFailed, match="input x is text"):
        runtime.open("f", fragment.folder, fragment.least_bytes)


def describe_rows(made: MadeFragment, size: int) -> None:
    """Let the first block be reckoned with that many bytes of its table."""
    manifest = json.loads((made.folder / "fragment.json").read_text())
    manifest["blocks"][0]["weight_bytes"] = size
    (made.folder / "fragment.json").write_text(json.dumps(manifest))


def test_rows_of_a_table_do_not_gather_over_many_items(runtime: Runtime, tmp_path: Path) -> None:
    made = write_fragment(tmp_path, table_model(), 16 * MIB, InBlocks(2))
    describe_rows(made, MIB)
    runtime.open("f", made.folder, 5 * MIB)
    for words in np.random.default_rng(1).integers(0, 8192, (20, 8)):
        runtime.run("f", {"x": words}, Stopper())
        # What is left is the matrix of the other block.
        assert resident(made.folder) == (256 << 10, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 7}, "describes no blocks: blocks are not a list"),
        ({"outputs": [{"name": "z"}]}, "no block gives the output 'z'"),
        ({"inputs": []}, "block 0 takes 'x', which nothing gives"),
    ],
)
def test_a_manifest_that_describes_no_blocks_is_damage(
    runtime: Runtime, made: MadeFragment, change: dict[str, object], message: str
) -> None:
    manifest = json.loads((made.folder / "fragment.json").read_text())
    (made.folder / "fragment.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(FragmentDamaged, match=message):
        runtime.open("f", made.folder, made.least_bytes)


def test_blocks_that_are_no_models_fail_to_open(runtime: Runtime, made: MadeFragment) -> None:
    blocks = made.folder / "blocks.bin"
    blocks.write_bytes(bytes(blocks.stat().st_size))
    with pytest.raises(RuntimeFailed):
        runtime.open("f", made.folder, made.least_bytes)
    assert mapped_ranges(made.folder.resolve()) == []


def test_mappings_that_the_kernel_has_merged_are_told_apart() -> None:
    before = [PageRange(10, 20), PageRange(40, 50)]
    assert added(before, [PageRange(5, 25), PageRange(40, 50), PageRange(60, 70)]) == (
        PageRange(5, 10),
        PageRange(20, 25),
        PageRange(60, 70),
    )
    assert added([], before) == tuple(before)
    assert added(before, before) == ()


def test_what_is_dropped_beyond_a_size_is_whole_pages() -> None:
    ranges = [PageRange(0, 2 * PAGE), PageRange(8 * PAGE, 9 * PAGE)]
    assert beyond(ranges, 0) == tuple(ranges)
    assert beyond(ranges, PAGE + 17) == (PageRange(PAGE, 2 * PAGE), ranges[1])
    assert beyond(ranges, 2 * PAGE) == (ranges[1],)
    assert beyond(ranges, 3 * PAGE) == ()


def test_no_huge_page_is_cut() -> None:
    ranges = [PageRange(PAGE, 5 * MIB)]
    # From PAGE to 2 MiB there is none, from 2 to 4 there may be one, and then there is none.
    assert beyond(ranges, MIB) == (PageRange(PAGE + MIB, 5 * MIB),)
    assert beyond(ranges, 3 * MIB) == (PageRange(2 * MIB, 5 * MIB),)
    assert beyond(ranges, 9 * MIB // 2) == (PageRange(PAGE + 9 * MIB // 2, 5 * MIB),)


def test_rows_of_a_table_take_no_more_memory_after_a_restart(
    runtime: Runtime, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, table_model(rows=49152), 64 * MIB)
    with (made.folder / "weights.bin").open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # The next process reads all of it, to verify it, and so it is cached.
    FragmentCache(tmp_path, 1 << 30).verify(made.digest)
    runtime.open("f", made.folder)
    words = np.arange(1024, 49152, 4096)
    runtime.run("f", {"x": words}, Stopper())
    assert resident(made.folder)[0] <= (len(words) * 64 + 256 + 64) << 10
