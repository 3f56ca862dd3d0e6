"""A model and where to cut it -> fragments in the store.

docs/ARCHITECTURE.md describes the layout of the store, `shoal_planner.segments` chooses the nodes.
Cutting again reuses what exists, and replaces what of it is damaged; a cut that was killed leaves
`*.part` folders, which the next one removes. One cut at a time works on a store: a lock on it sees
to that.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from shoal_compiler.blocks import make_blocks
from shoal_compiler.errors import ModelRefused
from shoal_compiler.fragments import FragmentFiles, Sources, is_stored, layout_weights
from shoal_compiler.graph import Graph, normalise
from shoal_compiler.models import make_model
from shoal_compiler.safety import open_model
from shoal_compiler.slicing import slice_layers
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Layout, Piece
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument, TensorSpec


def cut_model(
    path: Path,
    profile: Profile,
    cuts: Sequence[int],
    store: Path | None,
    progress: Callable[[int, int], None] | None = None,
) -> PartitionDocument:
    """Write the fragments to `store`, or without one only say what they would be; `progress` is
    called with (fragments done, fragments in all).

    `profile` is of the same file, `cuts` are what `shoal_planner.cuts` chose. Raises
    `ModelRefused`: the model is not the one that was profiled, or cannot be cut there.
    """
    layout = Layout(profile)
    _check_cuts(layout, cuts)
    graph = slice_layers(normalise(open_model(Path(path))))
    _check_same(graph, profile, Path(path))
    pieces = layout.pieces(tuple(cuts))
    fragments: list[Fragment] = []
    builder = _Builder(graph, profile, Sources())
    try:
        with nullcontext() if store is None else _locked(store):
            for index, piece in enumerate(pieces):
                files = builder.files(piece)
                digest = files.write(store)
                fragments.append(
                    Fragment(
                        index=index,
                        digest=digest,
                        nodes=len(piece.nodes),
                        weight_bytes=files.weight_bytes,
                        resident_bytes=files.resident_bytes,
                        least_bytes=files.least_bytes,
                        activation_bytes=piece.segment.activation_bytes,
                        flops=piece.segment.flops,
                        inputs=files.inputs,
                        outputs=files.outputs,
                    )
                )
                if progress is not None:
                    progress(index + 1, len(pieces))
    finally:
        builder.sources.close()
    return PartitionDocument(
        model_digest=profile.digest,
        fragments=tuple(fragments),
        edges=tuple(_edges(layout, pieces)),
        inputs=profile.inputs,
        outputs=profile.outputs,
    )


def _check_cuts(layout: Layout, cuts: Sequence[int]) -> None:
    if list(cuts) != sorted(set(cuts)):
        raise ModelRefused(f"cannot be cut at {list(cuts)}: positions must grow")
    for cut in cuts:
        if cut in layout.obstacles:
            label = layout.profile.nodes[cut].label
            raise ModelRefused(f"cannot be cut here: {layout.obstacles[cut]}", node=label)
        if cut not in layout.positions:
            raise ModelRefused(f"cannot be cut at {cut}: no node there can start a fragment")


def _check_same(graph: Graph, profile: Profile, path: Path) -> None:
    """The file is still the one that the profile is of; its weights are checked by size alone."""
    nodes = sorted(profile.nodes, key=lambda each: each.source)
    same = [each.label for each in nodes] == list(graph.labels) and all(
        name in graph.sparse or (name in graph.weights and graph.weights[name].bytes == size)
        for name, size in profile.weights.items()
    )
    if not same:
        raise ModelRefused("is not the model that was profiled", path=path)


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Hold the store's lock; remove what a killed cut has left."""
    fragments = store / "fragments"
    fragments.mkdir(parents=True, exist_ok=True)
    with (fragments / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in fragments.glob("*.part"):
            shutil.rmtree(left, ignore_errors=True)
        yield


@dataclass(frozen=True, slots=True)
class _Builder:
    graph: Graph
    profile: Profile
    sources: Sources

    def files(self, piece: Piece) -> FragmentFiles:
        """The files of one fragment."""
        weights = [self.graph.weights[name] for name in piece.weights if name in self.graph.weights]
        stored = layout_weights([each for each in weights if is_stored(each)])
        offsets = {each.weight.tensor.name: each.offset for each in stored}
        whole = make_model(self.graph, self.profile, piece, offsets)
        return FragmentFiles(
            model=whole.model,
            stored=stored,
            inputs=whole.inputs,
            largest=_largest(self.profile, whole.inputs),
            outputs=whole.outputs,
            weight_bytes=sum(
                self.profile.weights[name]
                for name in piece.weights
                if name in self.graph.sparse or self.graph.weights[name].whole not in piece.weights
            ),
            resident_bytes=piece.segment.resident_bytes,
            in_order=piece.in_order(self.profile),
            blocks=make_blocks(self.graph, self.profile, piece, whole, offsets),
            sources=self.sources,
        )


def _largest(profile: Profile, inputs: Sequence[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """The largest shapes that are planned for, of inputs whose sizes the graph leaves open."""
    sizes = {each.name: profile.tensors[each.name].sizes for each in inputs}
    return {
        spec.name: known
        for spec in inputs
        if (known := sizes[spec.name]) is not None and known != spec.shape
    }


def _edges(layout: Layout, pieces: Sequence[Piece]) -> Iterable[Edge]:
    """Who sends what to whom: the fragment that makes a tensor, to each that takes it."""
    profile = layout.profile
    home = {name: index for index, piece in enumerate(pieces) for name in piece.gives}
    home |= {
        name: index
        for index, piece in enumerate(pieces)
        for name in piece.gives
        if name in layout.makers and profile.nodes[layout.makers[name]].role is not Role.CONSTANT
    }
    wanted = [(index, piece.takes) for index, piece in enumerate(pieces)]
    wanted.append((MODEL, tuple(each.name for each in profile.outputs)))
    given = {each.name for each in profile.inputs}
    for consumer, names in wanted:
        by_producer: dict[int, list[str]] = {}
        for name in names:
            from_model = name in given and consumer != MODEL
            by_producer.setdefault(MODEL if from_model else home[name], []).append(name)
        for producer, tensors in sorted(by_producer.items()):
            sizes = [_bytes(profile, name) for name in tensors]
            known = [size for size in sizes if size is not None]
            yield Edge(
                producer=producer,
                consumer=consumer,
                tensors=tuple(tensors),
                bytes_per_item=sum(known) if len(known) == len(sizes) else None,
            )


def _bytes(profile: Profile, name: str) -> int | None:
    return profile.tensors[name].bytes if name in profile.tensors else profile.weights.get(name)
