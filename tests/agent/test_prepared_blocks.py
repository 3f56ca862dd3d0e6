"""Blocks that were prepared: whose pages are whose, and which of them stay."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnxruntime
import pytest

from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.test_preparation import AMPLE, MIB, Bench, mapped_bytes
from shoal_agent.memory.swapping import HUGE_PAGE_BYTES
from shoal_agent.runtime import mapped_pages, onnx_runtime
from shoal_agent.runtime.beside_arena import weights_to_come
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.external_data import align
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.mapped_weights import packs_floats
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_protocol.onnx_subset_pb2 import Entry, Graph, Model, Tensor


@pytest.mark.parametrize("linked", [False, True])
async def test_blocks_are_prepared_too_and_their_pages_dropped(
    tmp_path: Path, linked: bool
) -> None:
    """Also where a link leads to the cache."""
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    x = {"x": np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)}
    # The largest matrix is there twice for a moment, when its block is opened.
    granted = made.least_bytes + 3 * MIB
    folder = made.folder
    if linked:
        folder = tmp_path / "linked"
        folder.symlink_to(made.folder)
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, folder, granted)
    assert prepared.whole is None, "a form was made that is not needed"
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("whole", made.folder)
    whole = runtime.run("whole", x, Stopper()).outputs["y"]
    runtime.close("whole")
    runtime.open("blocks", folder, granted, prepared)
    assert mapped_bytes(made, "weights.bin") is None
    for size in (granted, granted, made.least_bytes, made.least_bytes):
        runtime.grant("blocks", size)
        result = runtime.run("blocks", x, Stopper()).outputs["y"]
        np.testing.assert_allclose(result, whole, rtol=1e-4, atol=1e-5)
        kept = size - made.least_bytes
        mapped = mapped_bytes(made, "prepared/")
        assert mapped is not None
        # Where a huge page lies, by chance, over the border of what is kept, all of it is dropped.
        assert kept - HUGE_PAGE_BYTES < mapped[0] <= kept
        assert mapped[1] == 0
    runtime.close("blocks")


@pytest.mark.parametrize("kept", [0, 3])
def test_before_a_trial_what_a_block_streams_is_to_come_beside_what_all_keep(
    tmp_path: Path, kept: int
) -> None:
    """Of 8 matrices of 1 MiB each, all of which work with as little."""
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("blocks", made.folder, made.least_bytes + kept * MIB)
    fragment = runtime._open["blocks"]
    assert isinstance(fragment, BlockFragment)
    assert fragment.streamed_at_most_work == MIB
    assert kept * MIB < weights_to_come(fragment) - MIB // 2 <= (kept + 1) * MIB
    runtime.close("blocks")


async def test_what_is_mapped_is_read_before_and_after_all_prepared_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each: that takes longer than to open them, where an agent has mapped much."""
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    granted = made.least_bytes + 3 * MIB
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, made.folder, granted)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    read: list[str] = []

    def counting(path: str, **options: Any) -> TextIO:
        read.append(path)
        file: TextIO = open(path, **options)  # noqa: SIM115 - its caller closes it
        return file

    monkeypatch.setattr(mapped_pages, "open", counting, raising=False)
    runtime.open("blocks", made.folder, granted, prepared)
    assert len(read) == 2
    runtime.close("blocks")


async def test_blocks_that_a_smaller_grant_opens_are_packed_one_after_the_other_between_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    x = {"x": np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)}
    granted = made.least_bytes + 3 * MIB
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, made.folder, granted)
    monkeypatch.setattr(onnx_runtime, "_PACKING_SECONDS", 0.0)
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=AMPLE)
    meter.settle()
    runtime.open("f", made.folder, made.resident_bytes, prepared)
    whole = runtime.run("f", x, Stopper()).outputs["y"]
    assert not runtime.pack("f"), "as a whole it was opened as it runs fastest"
    packs: list[bool] = []
    opened = onnxruntime.InferenceSession

    def counting(model: Any, options: Any, **others: Any) -> Any:
        packs.append(True)
        with suppress(RuntimeError):  # the runtime's answer where nobody has said so
            packs[-1] = options.get_session_config_entry("session.disable_prepacking") != "1"
        return opened(model, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", counting)
    runtime.grant("f", granted)
    assert packs == [False] * 8
    meter.begin_peak()
    for packed in range(1, 9):
        result = runtime.run("f", x, Stopper()).outputs["y"]
        np.testing.assert_allclose(result, whole, rtol=1e-4, atol=1e-5)
        assert runtime.pack("f") == (packed < 8)
        assert packs == [False] * 8 + [True] * packed
    assert meter.peak_since_begin_bytes() <= granted
    result = runtime.run("f", x, Stopper()).outputs["y"]
    np.testing.assert_allclose(result, whole, rtol=1e-4, atol=1e-5)
    mapped = mapped_bytes(made, "prepared/")
    assert mapped is not None
    assert mapped[0] > 2 * MIB, "what the grant has room for stays in memory again"
    runtime.close("f")
    assert not runtime.pack("f")


async def test_blocks_are_packed_only_where_the_grant_of_now_has_room_for_it(
    tmp_path: Path,
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    granted = made.least_bytes + 3 * MIB
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, made.folder, granted)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("f", made.folder, made.resident_bytes, prepared)
    runtime.grant("f", granted)
    fragment = runtime._open["f"]
    assert isinstance(fragment, BlockFragment)
    unpacked = len(fragment._source.unpacked)
    runtime.grant("f", fragment._source.least_bytes)
    assert not runtime.pack("f")
    assert runtime._open["f"] is fragment
    assert len(fragment._source.unpacked) == unpacked > 0
    runtime.grant("f", granted)
    while runtime.pack("f"):
        pass
    assert not fragment._source.unpacked


async def test_blocks_whose_prepared_form_has_made_room_on_the_disk_are_opened_as_they_were_cut(
    tmp_path: Path,
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    x = {"x": np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)}
    granted = made.least_bytes + 3 * MIB
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, made.folder, granted)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("f", made.folder, made.resident_bytes, prepared)
    whole = runtime.run("f", x, Stopper()).outputs["y"]
    shutil.rmtree(made.folder / "prepared")
    runtime.grant("f", granted)
    assert not runtime.pack("f")
    result = runtime.run("f", x, Stopper()).outputs["y"]
    np.testing.assert_allclose(result, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("types", "expected"), [((), False), ((1, 1), True), ((1, 3), False), ((2,), False)]
)
def test_only_products_of_floats_run_without_packed_weights(
    tmp_path: Path, types: tuple[int, ...], expected: bool
) -> None:
    packed = [Entry(key="offset", value="0"), Entry(key="prepacked_0", value="k|0;1;1")]
    plain = Tensor(name="plain", data_type=3, external_data=packed[:1])
    tensors = [Tensor(name="w", data_type=each, external_data=packed) for each in types]
    path = tmp_path / "model.onnx"
    path.write_bytes(Model(graph=Graph(initializer=[plain, *tensors])).SerializeToString())
    assert packs_floats(path) == expected


@pytest.mark.parametrize("rows", [False, True])
def test_large_packed_forms_begin_huge_pages_unless_the_model_has_a_table(
    tmp_path: Path, rows: bool
) -> None:
    sizes = {"small": 3000, "large": HUGE_PAGE_BYTES + 5000, "other": HUGE_PAGE_BYTES}
    tensors, content = [], b""
    for fill, (name, size) in enumerate(sizes.items(), 1):
        entries = [
            Entry(key="offset", value=str(len(content))),
            Entry(key="length", value=str(size)),
            Entry(key="prepacked_0", value=f"k|{len(content) + size};{size};{size}"),
        ]
        content += bytes([fill]) * size + bytes([fill + 100]) * size
        tensors.append(Tensor(name=name, data_type=1, external_data=entries))
    (tmp_path / "weights.bin").write_bytes(content)
    model = Model(graph=Graph(initializer=tensors))
    align(tmp_path, model, rows=rows)
    written = (tmp_path / "weights.bin").read_bytes()
    begins_huge_page = {}
    for fill, tensor in enumerate(model.graph.initializer, 1):
        values = {each.key: each.value for each in tensor.external_data}
        size, plain = sizes[tensor.name], int(values["offset"])
        packed = int(values["prepacked_0"].split("|")[1].split(";")[0])
        assert written[plain : plain + size] == bytes([fill]) * size
        assert written[packed : packed + size] == bytes([fill + 100]) * size
        assert plain % 4096 == packed % 4096 == 0
        begins_huge_page[tensor.name] = packed % HUGE_PAGE_BYTES == 0
    assert begins_huge_page == {"small": False, "large": not rows, "other": not rows}
