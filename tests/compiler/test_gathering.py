"""Tables of which devices read rows by themselves, where they run a fragment in blocks."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chaining import Tensors, manifest, run_chained
from made_models import Recommender, weight
from shoal_compiler.cutting import Cut, cut_model
from shoal_compiler.profile import Source, profile_model
from shoal_planner.cut_tables import table_of
from shoal_planner.cuts import CutRequest, choose_cuts
from shoal_planner.least_limit import least_needs
from shoal_planner.loads import paged_bytes
from shoal_planner.segments import Layout
from shoal_protocol.blocks import Block, Gathered
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import Fragment, PartitionDocument, document_from_json
from shoal_protocol.partition import document_to_json as as_json

MIB = 1 << 20
ROWS, WIDTH, READS = 8192, 256, 64


def saved(folder: Path, *nodes: onnx.NodeProto, ids: list[int], **weights: Any) -> Path:
    """A model with a table `t` of 8 MiB that takes `ids`."""
    weights = {"t": weight(ROWS, WIDTH), **weights}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ids)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def node(operator: str, taken: str, made: str, **how: Any) -> onnx.NodeProto:
    return helper.make_node(operator, taken.split(), made.split(), **how)


GATHER = node("Gather", "t ids", "rows")
LAYERS = (node("MatMul", "rows w", "h"), node("Tanh", "h", "y"))
LAYER = {"w": weight(WIDTH, WIDTH, seed=1)}


def item(*shape: int) -> Tensors:
    return {"ids": np.random.default_rng(0).integers(-ROWS, ROWS, shape)}


def cut(path: Path, store: Path, fragments: int = 1) -> PartitionDocument:
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(fragments=fragments))
    assert isinstance(cuts, tuple)
    return cut_model(path, profile, cuts, store)


def blocks_of(store: Path, fragment: Fragment) -> tuple[Block, ...]:
    return FragmentStore(store).manifest(fragment.digest).blocks


def test_a_block_takes_the_rows_and_has_not_the_table(tmp_path: Path) -> None:
    path = saved(tmp_path, GATHER, *LAYERS, ids=[2, READS], **LAYER)
    document = cut(path, tmp_path)
    (fragment,) = document.fragments
    (block,) = blocks_of(tmp_path, fragment)
    assert block.gathers == (Gathered(table="t", indices="ids", rows="rows"),)
    assert (block.takes, block.gives) == (("rows",), ("y",))
    assert block.weight_bytes == LAYER["w"].nbytes
    assert fragment.least_bytes < 6 * MIB < 12 * MIB < fragment.resident_bytes
    assert fragment.gathered_bytes == 4 * ROWS * WIDTH
    assert document_from_json(as_json(document)) == document
    run_chained(tmp_path, document, item(2, READS))  # which compares blocks with the whole


CHAIN = (
    node("Cast", "ids", "small", to=TensorProto.INT32),
    node("Unsqueeze", "small first", "wide"),
    node("Add", "wide more", "shifted"),
    node("Gather", "t shifted", "rows"),
)
CHAIN_WEIGHTS = {"first": np.array([0]), "more": np.array(7, np.int32)}


def test_what_makes_the_indices_is_a_block_of_its_own_before_all_others(tmp_path: Path) -> None:
    weights = {f"w{layer}": weight(WIDTH, WIDTH, seed=layer) for layer in range(12)}
    nodes = [node("MatMul", f"h{layer} w{layer}", f"h{layer + 1}") for layer in range(12)]
    nodes[0].input[0], nodes[-1].output[0] = "rows", "y"
    path = saved(tmp_path, *CHAIN, *nodes, ids=[READS], **CHAIN_WEIGHTS, **weights)
    document = cut(path, tmp_path)
    (fragment,) = document.fragments
    first, second, *others = blocks_of(tmp_path, fragment)
    assert (first.takes, first.gives, first.weight_bytes) == (("ids",), ("shifted",), 0)
    assert second.gathers == (Gathered(table="t", indices="shifted", rows="rows"),)
    assert "rows" in second.takes
    assert all(not each.gathers for each in others)
    rows = np.random.default_rng(0).integers(0, ROWS - 7, READS)
    run_chained(tmp_path, document, {"ids": rows})


def test_indices_may_come_from_the_fragment_before(tmp_path: Path) -> None:
    path = saved(tmp_path, *CHAIN, *LAYERS, ids=[READS], **CHAIN_WEIGHTS, **LAYER)
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(tensors=("small",)))
    assert isinstance(cuts, tuple)
    document = cut_model(path, profile, cuts, tmp_path)
    _, fragment = document.fragments
    first, *_ = blocks_of(tmp_path, fragment)
    assert first.gives == ("shifted",)
    run_chained(tmp_path, document, {"ids": np.arange(READS)})


def test_a_fragment_that_is_a_table_gives_its_rows(tmp_path: Path) -> None:
    path = saved(tmp_path, GATHER, *LAYERS, ids=[READS], **LAYER)
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(tensors=("rows",)))
    assert isinstance(cuts, tuple)
    document = cut_model(path, profile, cuts, tmp_path)
    (block,) = blocks_of(tmp_path, document.fragments[0])
    assert (block.takes, block.gives) == (("rows",), ("rows",))
    run_chained(tmp_path, document, item(READS))


def test_a_table_that_two_fragments_read_is_one_file_for_both(tmp_path: Path) -> None:
    again = (node("Gather", "t ids", "others"), node("Add", "h others", "sum"))
    layers = (node("MatMul", "rows w", "h"), *again, node("MatMul", "sum w2", "y"))
    other = {"w2": weight(WIDTH, WIDTH, seed=2)}
    path = saved(tmp_path, GATHER, *layers, ids=[READS], **LAYER, **other)
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(tensors=("h",)))
    assert isinstance(cuts, tuple)
    document = cut_model(path, profile, cuts, tmp_path)
    for fragment in document.fragments:
        described: Any = manifest(tmp_path, fragment.digest)["initializers"]
        assert described["t"]["file"] == "shared.0.bin"
        blocks = blocks_of(tmp_path, fragment)
        assert [each.table for block in blocks for each in block.gathers] == ["t"]
    run_chained(tmp_path, document, item(READS))


def test_a_table_whose_parts_are_an_output_layer_is_read_again_for_that(tmp_path: Path) -> None:
    words, layer = (
        16 * ROWS,
        (node("Transpose", "t", "tt", perm=[1, 0]), node("MatMul", "rows tt", "y")),
    )
    table = {"t": weight(words, 64)}
    path = saved(tmp_path, GATHER, *layer, ids=[1, READS], **table)
    source = next(each for each in Source.open(path).slicings() if each.slicing)
    profile = source.profile()
    made = Cut(source, profile, ())
    made.write(tmp_path)
    (fragment,) = made.document.fragments
    blocks = blocks_of(tmp_path, fragment)
    assert [each.table for block in blocks for each in block.gathers] == ["t"]
    assert not fragment.gathered_bytes
    assert paged_bytes(fragment, fragment.least_bytes) >= table["t"].nbytes
    run_chained(tmp_path, made.document, {"ids": item(1, READS)["ids"]}, within=1e-5)


def test_rows_that_are_outputs_are_joined_by_the_device(tmp_path: Path) -> None:
    width = 4 * WIDTH
    nodes = [node("Gather", f"t{each} ids", f"rows{each}") for each in range(3)]
    nodes.append(node("Concat", "rows0 rows1 rows2", "y", axis=1))
    tables = {f"t{each}": weight(ROWS, width, seed=each) for each in range(3)}
    path = saved(tmp_path, *nodes, ids=[256], **tables)
    document = cut(path, tmp_path)
    (fragment,) = document.fragments
    assert manifest(tmp_path, fragment.digest)["joins"]
    assert len([each for block in blocks_of(tmp_path, fragment) for each in block.gathers]) == 3
    run_chained(tmp_path, document, item(256))


MAPPED: dict[str, tuple[list[onnx.NodeProto], list[int]]] = {
    "a table that is an output layer too": (
        [GATHER, node("Transpose", "t", "tt", perm=[1, 0]), node("MatMul", "rows tt", "y")],
        [READS],
    ),
    "a few rows": ([GATHER, *LAYERS], [4]),
    "more rows than the table has pages": ([GATHER, *LAYERS], [ROWS // 2]),
    "indices that are much work": (
        [
            node("Cast", "ids", "numbers", to=TensorProto.FLOAT),
            node("MatMul", "numbers w", "scores"),
            node("TopK", "scores k", "most which"),
            node("Gather", "t which", "rows"),
            *LAYERS,
        ],
        [WIDTH],
    ),
    "columns": ([node("Gather", "t ids", "rows", axis=1), node("Tanh", "rows", "y")], [READS]),
}


@pytest.mark.parametrize("name", MAPPED)
def test_others_are_mapped(name: str, tmp_path: Path) -> None:
    nodes, shape = MAPPED[name]
    path = saved(tmp_path, *nodes, ids=shape, **LAYER, k=np.array([READS]))
    document = cut(path, tmp_path)
    (fragment,) = document.fragments
    assert not fragment.gathered_bytes
    assert all(not each.gathers for each in blocks_of(tmp_path, fragment))
    run_chained(tmp_path, document, {"ids": item(*shape)["ids"] % WIDTH})


def test_searches_for_cuts_in_blocks_reckon_with_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(Recommender().proto(), path)
    profile = profile_model(path)
    mapped, gathered = (Layout(profile, row_items=1, gathered=each) for each in (False, True))
    assert max(least_needs(gathered)) < 4 * MIB < 8 * MIB < max(least_needs(mapped))
    (fragment,) = cut_model(path, profile, (), None).fragments
    table = table_of(profile)
    whole = table.candidate(0, table.end)
    assert whole.resident_bytes == fragment.resident_bytes
    assert fragment.least_bytes // 2 < whole.least_bytes < 2 * fragment.least_bytes


def test_of_tables_a_plan_has_an_item_read_the_pages_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(Recommender().proto(), path)
    (fragment,) = cut(path, tmp_path).fragments
    others, least = fragment.weight_bytes - fragment.gathered_bytes, fragment.least_bytes
    pages = 4 * 512 * 4096
    assert fragment.row_bytes == pages
    assert paged_bytes(fragment, least) == pages + others < 9 * MIB
    assert paged_bytes(fragment, least + others // 2) <= pages + others // 2 + 1
    assert paged_bytes(fragment, least + others) == pages
    assert paged_bytes(fragment, fragment.resident_bytes) == 0
