"""A pipeline in its steady state, and what it is compared with.

A pipeline fills before its last stage has work, and drains when its first has none. Both take a
time that depends on the number of stages, not of items. So the first and the last items are cut
off, and what is left is a rate. It is compared with that of the slowest stage alone: a job of this
one fragment, on the same device with the same share of a processor, that always has work. That
takes all that the process pays for (receiving, running, sending), as it does in the pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime

from shoal_protocol.partition import MODEL, Edge, PartitionDocument
from shoal_protocol.tensors import Array

CUT_OFF: Final = 0.1
"""The share of the items that is cut off at either end."""


def steady_rate(ends: Sequence[float]) -> float:
    """Items a second, from the times at which they ended, without the first and the last."""
    ends = sorted(ends)
    cut = max(1, round(CUT_OFF * len(ends)))
    middle = ends[cut : len(ends) - cut]
    return (len(middle) - 1) / (middle[-1] - middle[0])


def ended_at(outputs: Path) -> list[float]:
    """When the items of a job ended: when their results were written."""
    return [path.stat().st_mtime_ns / 1e9 for path in outputs.glob("*.npz")]


def streaming_bound(stage_seconds: Sequence[float], items: int) -> float:
    """The least that streaming can take against barrier mode, with a device for each stage: the
    first item passes every stage, then the slowest stage ends one after the other; a barrier lets
    one stage work at a time."""
    total = sum(stage_seconds)
    return (total + (items - 1) * max(stage_seconds)) / (items * total)


def alone(document: PartitionDocument, stage: int) -> PartitionDocument:
    """A model that is one of the fragments: the same file, so a device that has it loads nothing.
    What reaches it from several others reaches it from the outside."""
    fragment = replace(document.fragments[stage], index=0)
    into, out = document.into(stage), document.out_of(stage)
    return replace(
        document,
        fragments=(fragment,),
        edges=(
            Edge(
                producer=MODEL,
                consumer=0,
                tensors=tuple(spec.name for spec in fragment.inputs),
                bytes_per_item=_total([edge.bytes_per_item for edge in into]),
            ),
            Edge(
                producer=0,
                consumer=MODEL,
                tensors=tuple(spec.name for spec in fragment.outputs),
                bytes_per_item=_total([edge.bytes_per_item for edge in out]),
            ),
        ),
        inputs=fragment.inputs,
        outputs=fragment.outputs,
    )


def stage_inputs(
    document: PartitionDocument, store: Path, items: Sequence[Mapping[str, Array]]
) -> list[list[dict[str, Array]]]:
    """What each stage takes of each item: by stage, then by item."""
    known: list[dict[str, Array]] = [dict(item) for item in items]
    taken: list[list[dict[str, Array]]] = []
    for fragment in document.fragments:
        folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        names = [spec.name for spec in fragment.outputs]
        feeds = [{spec.name: values[spec.name] for spec in fragment.inputs} for values in known]
        taken.append(feeds)
        for values, feed in zip(known, feeds, strict=True):
            outputs = zip(names, session.run(names, feed), strict=True)
            values.update((name, np.asarray(output)) for name, output in outputs)
    return taken


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
