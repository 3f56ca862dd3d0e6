"""Makes fragments in the store's format from ONNX models, for the agent's tests.

Written from docs/ARCHITECTURE.md on purpose, and not with the control plane's cutting: the agent
must take whatever follows the document.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from shoal_protocol.blocks import Block, blocks_as_json, least_bytes

ALIGNMENT = 4096
EXTERNAL_FROM = 1024


@dataclass(frozen=True, slots=True)
class MadeFragment:
    """A fragment in a store: where it is, its name, and what it takes and gives."""

    digest: str
    folder: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    resident_bytes: int
    least_bytes: int


@dataclass(frozen=True, slots=True)
class InBlocks:
    """How a fragment is cut into blocks, and what each is said to need besides its weights; of
    those it reads at most `read_bytes`. Before those that are `emptied` the arena is; from the last
    of them on, blocks are said to need `last_working_bytes` besides."""

    count: int
    held_bytes: int = 256 << 10
    working_bytes: int = 1 << 20
    read_bytes: int = 1 << 40
    emptied: tuple[int, ...] = ()
    last_working_bytes: int = 0


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_fragment(  # noqa: PLR0913 - what a manifest may say
    store: Path,
    model: onnx.ModelProto,
    resident_bytes: int | None = None,
    blocks: InBlocks | None = None,
    largest: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Sequence[int]] | None = None,
    *,
    seen: Mapping[str, Sequence[int]] | None = None,
    beside_bytes: int = 0,
    batched: bool = False,
    unknown_sizes: bool = False,
    chooses: bool = False,
    dequantises: bool = False,
) -> MadeFragment:
    """Write one self-contained model, weights inside, as a fragment of the store; `largest` are
    the largest shapes of its inputs, `values` what those of them hold that are a few integers,
    `seen` sizes of others that items have shown, `beside_bytes` what a node takes outside of the
    arena. `batched`: it may run several items at once.
    `unknown_sizes`: those of its activations. `chooses`: of its branches, a trial shows one.
    `dequantises`: its quantised weights are not to be copied."""
    model = lift_constants(model)
    weights, initializers = pack_weights(model)
    externalise(model, initializers)
    files: dict[str, bytes] = {"model.onnx": model.SerializeToString(deterministic=True)}
    if weights:
        files["weights.bin"] = weights
    resident = resident_bytes or (2 * len(weights) + (4 << 20))
    manifest: dict[str, Any] = {
        "version": 1,
        "inputs": [spec(value) for value in model.graph.input],
        "outputs": [spec(value) for value in model.graph.output],
        "weight_bytes": len(weights),
        "resident_bytes": resident,
        "initializers": initializers,
        "beside_bytes": beside_bytes,
    }
    for key, given in {"largest": largest, "values": values, "seen": seen}.items():
        if given is not None:
            manifest[key] = {name: list(each) for name, each in given.items()}
    flags = {"unknown_sizes": unknown_sizes, "chooses": chooses, "dequantises": dequantises}
    manifest |= {key: True for key, given in flags.items() if given}
    manifest |= {"batched": {}} if batched else {}
    least = resident
    if blocks is not None:
        described, files["blocks.bin"] = pack_blocks(model, initializers, blocks)
        manifest["blocks"] = blocks_as_json(described)
        least = least_bytes(described)
    manifest["files"] = {
        name: {"sha256": sha256(data), "bytes": len(data)} for name, data in files.items()
    }
    folder = _write(store, files, manifest)
    return MadeFragment(
        digest=f"sha256:{folder.name}",
        folder=folder,
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(value.name for value in model.graph.output),
        resident_bytes=resident,
        least_bytes=least,
    )


def _write(store: Path, files: dict[str, bytes], manifest: Mapping[str, Any]) -> Path:
    """The folder of a fragment with these files."""
    files["fragment.json"] = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    folder = store / "fragments" / sha256(files["fragment.json"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def pack_weights(model: onnx.ModelProto) -> tuple[bytes, dict[str, Any]]:
    """The content of weights.bin, and where in it each initializer is."""
    weights = bytearray()
    initializers: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        # Several numbers of fewer than 8 bits share a byte there, and have one each in an array.
        raw = tensor.raw_data or np.ascontiguousarray(numpy_helper.to_array(tensor)).tobytes()
        if len(raw) < EXTERNAL_FROM:
            continue
        weights.extend(b"\0" * (-len(weights) % ALIGNMENT))
        initializers[tensor.name] = {
            "dtype": dtype_name(tensor.data_type),
            "shape": list(tensor.dims),
            "offset": len(weights),
            "bytes": len(raw),
        }
        weights.extend(raw)
    return bytes(weights), initializers


def externalise(model: onnx.ModelProto, initializers: Mapping[str, Any]) -> None:
    """Leave of a model's weights where they are packed."""
    for tensor in model.graph.initializer:
        if (place := initializers.get(tensor.name)) is None:
            continue
        bare = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        bare.data_location = TensorProto.EXTERNAL
        entries = {"location": "weights.bin", "offset": place["offset"], "length": place["bytes"]}
        for key, value in entries.items():
            bare.external_data.add(key=key, value=str(value))
        tensor.CopyFrom(bare)


def pack_blocks(
    model: onnx.ModelProto, initializers: Mapping[str, Any], blocks: InBlocks
) -> tuple[list[Block], bytes]:
    """The blocks of a model without its weights, and the content of blocks.bin."""
    described, packed = [], bytearray()
    last = max(blocks.emptied, default=blocks.count)
    for index, piece in enumerate(cut(model, blocks.count)):
        used = [initializers.get(tensor.name, {"bytes": 0}) for tensor in piece.graph.initializer]
        content = piece.SerializeToString(deterministic=True)
        described.append(
            Block(
                model_offset=len(packed),
                model_bytes=len(content),
                takes=tuple(value.name for value in piece.graph.input),
                gives=tuple(value.name for value in piece.graph.output),
                held_bytes=blocks.held_bytes,
                weight_bytes=min(
                    sum(-(-each["bytes"] // ALIGNMENT) * ALIGNMENT for each in used),
                    blocks.read_bytes,
                ),
                working_bytes=blocks.last_working_bytes if index >= last else blocks.working_bytes,
                empties_arena=index in blocks.emptied,
            )
        )
        packed.extend(content)
    return described, bytes(packed)


def lift_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose Constant nodes are initializers: some exporters keep all weights in them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = []
    for node in copy.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = copy.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        else:
            kept.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    return copy


def dtype_name(data_type: int) -> str:
    return TensorProto.DataType.Name(data_type).lower()


def spec(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    shape: list[int | str | None] = []
    for dimension in tensor.shape.dim:
        match dimension.WhichOneof("value"):
            case "dim_value":
                shape.append(dimension.dim_value)
            case "dim_param":
                shape.append(dimension.dim_param)
            case _:
                shape.append(None)
    return {"name": value.name, "dtype": dtype_name(tensor.elem_type), "shape": shape}


def cut(model: onnx.ModelProto, count: int) -> list[onnx.ModelProto]:
    """Cut a model without control flow into `count` runs of nodes; any value may cross several."""
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    known = {value.name: value for value in [*graph.value_info, *graph.input, *graph.output]}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    constants = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    nodes = [node for node in graph.node if node.op_type != "Constant"]
    runs = [nodes[len(nodes) * i // count : len(nodes) * (i + 1) // count] for i in range(count)]
    wanted_at_end = [value.name for value in graph.output]
    pieces = []
    for index, run in enumerate(runs):
        made = {name for node in run for name in node.output if name}
        used = unique(name for node in run for name in node.input if name)
        later = {name for other in runs[index + 1 :] for node in other for name in node.input}
        later.update(wanted_at_end)
        inputs = [n for n in used if n not in made and n not in initializers | constants]
        outputs = [n for node in run for n in node.output if n in later]
        piece = helper.make_model(
            helper.make_graph(
                [constants[name] for name in used if name in constants] + list(run),
                f"{graph.name}-{index}",
                [known[name] for name in inputs],
                [known[name] for name in outputs],
                [initializers[name] for name in used if name in initializers],
            ),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        pieces.append(piece)
    return pieces


def unique(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def dense_model(
    sizes: Sequence[int], seed: int = 0, batch: int | str = "batch", prefix: str = ""
) -> onnx.ModelProto:
    """A chain of MatMul and Relu: input `x` [batch, sizes[0]], output `y` [batch, sizes[-1]]."""
    chance = np.random.default_rng(seed)
    nodes, initializers, current = [], [], f"{prefix}x"
    for index, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        scale = np.float32(rows**-0.5)
        weight = chance.standard_normal((rows, columns), dtype=np.float32) * scale
        initializers.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [current, f"w{index}"], [f"{prefix}m{index}"]))
        last = index == len(sizes) - 2
        current = f"{prefix}y" if last else f"{prefix}r{index}"
        nodes.append(helper.make_node("Relu", [f"{prefix}m{index}"], [current]))
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info(f"{prefix}x", TensorProto.FLOAT, [batch, sizes[0]])],
        [helper.make_tensor_value_info(f"{prefix}y", TensorProto.FLOAT, [batch, sizes[-1]])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def table_model(rows: int = 8192) -> onnx.ModelProto:
    """Looks rows of 1 KiB up in a table, and multiplies them."""
    chance = np.random.default_rng(0)
    table = chance.standard_normal((rows, 256), dtype=np.float32)
    weight = chance.standard_normal((256, 256), dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "x"], ["row"]),
            helper.make_node("MatMul", ["row", "w"], ["y"]),
        ],
        "words",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["length", 256])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def tied_model(rows: int = 8192) -> onnx.ModelProto:
    """Looks rows of 1 KiB up in a table, and multiplies them with the whole of it."""
    table = np.random.default_rng(0).standard_normal((rows, 256), dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "x"], ["row"]),
            helper.make_node("Transpose", ["table"], ["transposed"]),
            helper.make_node("MatMul", ["row", "transposed"], ["y"]),
        ],
        "words",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["length", rows])],
        [numpy_helper.from_array(table, "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def slow_model(rounds: int) -> onnx.ModelProto:
    """Input `x` [256, 256], output `y`: multiplied `rounds` times, about a millisecond each."""
    weight = np.eye(256, dtype=np.float32)
    shape = [256, 256]
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("MatMul", ["carried", "w"], ["multiplied"]),
        ],
        "body",
        [
            value("round", TensorProto.INT64, []),
            value("go_on", TensorProto.BOOL, []),
            value("carried", TensorProto.FLOAT, shape),
        ],
        [value("still", TensorProto.BOOL, []), value("multiplied", TensorProto.FLOAT, shape)],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["rounds", "", "x"], ["y"], body=body)],
        "slow",
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.array(rounds, np.int64), "rounds"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def tree_model(depth: int) -> onnx.ModelProto:
    """A decision tree that is a chain: each test has a leaf on one side, the next on the other. One
    of 20,000 tests ends ONNX Runtime with SIGSEGV when it is opened."""
    count, leaves = 2 * depth + 1, list(range(depth, 2 * depth + 1))
    none = [0] * len(leaves)
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[0] * count,
        nodes_nodeids=list(range(count)),
        nodes_featureids=[0] * count,
        nodes_values=[float(number) for number in range(count)],
        nodes_modes=["BRANCH_LEQ"] * depth + ["LEAF"] * len(leaves),
        nodes_truenodeids=leaves[:-1] + none,
        nodes_falsenodeids=[*range(1, depth), leaves[-1], *none],
        target_treeids=none,
        target_nodeids=leaves,
        target_ids=none,
        target_weights=[1.0] * len(leaves),
    )
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in "xy")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph([node], "tree", [x], [y])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)
