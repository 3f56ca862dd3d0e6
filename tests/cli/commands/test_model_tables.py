"""What a model and its cut are, at narrow widths and in a pipe: nothing is lost or cut short."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from fragment_pools import MIB, partition
from random_profiles import chain
from shoal_cli.commands.model_tables import inspection_table, partition_table
from shoal_cli.commands.tables import LOG_COLUMNS
from shoal_protocol.digests import Digest
from shoal_protocol.partition import Edge, TensorSpec

DIGEST = Digest("sha256:" + "0123456789abcdef" * 4)
LONG = "p2o.DynamicDimension.0"
TENSORS = tuple(f"encoder.layer.{number}.attention.output" for number in range(12))
WIDTHS = pytest.mark.parametrize("width", [40, 60, 80, LOG_COLUMNS])


def shown(table: RenderableType, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, markup=False).print(table)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


@WIDTHS
def test_a_model_is_shown_whole_at_any_width(width: int) -> None:
    tensor = TensorSpec(name="softmax_11.tmp_0", dtype="float", shape=(LONG, 3, None, 320))
    scalar = TensorSpec(name="count", dtype="int64", shape=())
    unknown = TensorSpec(name="any", dtype="float", shape=None)
    profile = replace(chain(1), digest=DIGEST, inputs=(tensor, scalar), outputs=(unknown,))
    text = shown(inspection_table("model.onnx", profile), width)
    assert DIGEST in "".join(text.split())
    assert {"softmax_11.tmp_0", f"[{LONG},", "320]", "[]", "[...]"} <= set(text.split())


@WIDTHS
def test_a_cut_is_shown_whole_at_any_width(width: int) -> None:
    document = partition([10**9] * 2, [20 * MIB] * 2, least=[7 * MIB, 5 * MIB])
    boundary = Edge(producer=0, consumer=1, tensors=TENSORS, bytes_per_item=None)
    text = shown(partition_table(replace(document, edges=(boundary,))), width)
    words = text.split()
    assert {"20", "7", "5", "resident", "FLOPs", "digest", "unknown"} <= set(words)
    assert ",".join(TENSORS) in "".join(words)
    assert all(words.count(fragment.digest[:19]) >= 1 for fragment in document.fragments)
