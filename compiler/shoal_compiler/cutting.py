"""A model and where to cut it -> fragments in the store.

docs/ARCHITECTURE.md describes the layout of the store, `shoal_planner.segments` chooses the nodes.
Cutting again reuses what exists, and replaces what of it is damaged; a cut that was killed leaves
`*.part` folders, which the next one removes. One cut at a time works on a store: a lock on it sees
to that.
"""

import fcntl
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import count, repeat
from pathlib import Path

from shoal_compiler.batching.proof import batching_of
from shoal_compiler.batching.values import Value
from shoal_compiler.blocks import make_blocks
from shoal_compiler.errors import ModelRefused
from shoal_compiler.fragments import FragmentFiles
from shoal_compiler.graph import Graph, Weight
from shoal_compiler.models import make_model
from shoal_compiler.profile import Source
from shoal_compiler.sharing import shared_groups
from shoal_compiler.weight_files import (
    Place,
    Sources,
    WeightFile,
    is_stored,
    offset_inside,
)
from shoal_planner.pieces import Piece
from shoal_planner.profile import NodeProfile, Profile, Role
from shoal_planner.segments import Layout
from shoal_protocol.manifest import WEIGHTS, shared_name
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument, TensorSpec, Work
from shoal_protocol.shared_files import SharedFiles


class Cut:
    """A model cut into fragments: what they are, and the means to write them.

    `profile` is of the same source, `cuts` are the `positions` that `shoal_planner` chose, in it or
    in a profile that has `learned` sizes from items. Raises `ModelRefused`: the model is not the
    one that was profiled, or cannot be cut there.
    """

    def __init__(
        self,
        source: Source,
        profile: Profile,
        cuts: Sequence[int],
        learned: Profile | None = None,
    ) -> None:
        self.positions = tuple(cuts)
        layout = Layout(profile)
        _check_cuts(layout, cuts)
        _check_same(source.graph, profile, source.path)
        pieces = layout.pieces(self.positions)
        with closing(Sources(source.weight_digests)) as sources:
            builder = _Builder(source.graph, profile, pieces, sources, learned or profile)
            self._files = [builder.files(piece) for piece in pieces]
        self.document = PartitionDocument(
            model_digest=profile.digest,
            fragments=tuple(map(_described, count(), pieces, self._files, repeat(profile))),
            edges=tuple(_edges(layout, pieces)),
            inputs=profile.inputs,
            outputs=profile.outputs,
            fixed=source.graph.fixed,
        )

    def write(self, store: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Write the fragments to `store`; `progress` is called with (fragments done, fragments in
        all). Raises `ModelRefused` if the model's files have changed."""
        with _locked(store), closing(Sources()) as sources:
            for done, files in enumerate(self._files, start=1):
                files.write(store, sources)
                if progress is not None:
                    progress(done, len(self._files))


def cut_model(
    path: Path,
    profile: Profile,
    cuts: Sequence[int],
    store: Path | None,
    progress: Callable[[int, int], None] | None = None,
) -> PartitionDocument:
    """`Cut` a model that was profiled by itself; without a store nothing is written."""
    cut = Cut(Source.open(path), profile, cuts)
    if store is not None:
        cut.write(store, progress)
    return cut.document


def _described(index: int, piece: Piece, files: FragmentFiles, profile: Profile) -> Fragment:
    works = [profile.nodes[position].work for position in piece.nodes]
    return Fragment(
        index=index,
        digest=files.digest,
        nodes=len(piece.nodes),
        weight_bytes=files.weight_bytes,
        resident_bytes=files.resident_bytes,
        least_bytes=files.least_bytes,
        activation_bytes=piece.segment.activation_bytes,
        flops=piece.segment.flops,
        work=None if None in works else sum(filter(None, works), Work()),
        batches=files.batched is not None,
        gathered_bytes=files.gathered_bytes,
        row_bytes=files.blocks.row_bytes,
        inputs=files.inputs,
        outputs=files.outputs,
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
        SharedFiles(store).collect()
        yield


class _Builder:
    """Makes the files of fragments; those that several share once."""

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        pieces: Sequence[Piece],
        sources: Sources,
        learned: Profile,
    ) -> None:
        self._graph = graph
        self._profile = profile
        self._learned = learned
        self._sources = sources
        self._batched: dict[str, Value] = {}
        uses = [
            {each.tensor.name: each.bytes for each in self._wholes(self._stored(piece))}
            for piece in pieces
        ]
        self._shared = [
            WeightFile.of([graph.weights[name] for name in names], sources)
            for names in shared_groups(uses)
        ]

    def files(self, piece: Piece) -> FragmentFiles:
        """The files of one fragment, after those of the fragments before it."""
        graph, profile = self._graph, self._profile
        stored = self._stored(piece)
        files = self._weight_files(stored)
        weights = {
            each.tensor.name: (each, place)
            for each, place in zip(stored, _places(stored, files), strict=True)
        }
        places = {name: place for name, (_, place) in weights.items()}
        whole = make_model(graph, profile, piece, places)
        batching = batching_of(whole.model, self._batched)
        self._batched |= batching.outputs
        return FragmentFiles(
            model=whole.model,
            weights=weights,
            weight_files=files,
            inputs=whole.inputs,
            largest=_largest(profile, whole.inputs),
            values={
                spec.name: known
                for spec in whole.inputs
                if (known := profile.tensors[spec.name].values) is not None
            },
            unknown_sizes=not all(
                _has_sizes(profile, profile.nodes[position]) for position in piece.nodes
            ),
            chooses=any(
                guard.condition not in piece.takes
                for position in piece.nodes
                for guard in graph.path(graph.nodes[profile.nodes[position].source])
            ),
            seen=_seen(profile, self._learned, whole.inputs),
            outputs=whole.outputs,
            weight_bytes=sum(
                profile.weights[name]
                for name in piece.weights
                if name in graph.sparse or graph.weights[name].whole not in piece.weights
            ),
            resident_bytes=piece.segment.resident_bytes,
            beside_bytes=_beside_bytes(profile, piece),
            in_order=piece.in_order(profile),
            blocks=make_blocks(graph, profile, piece, whole, places),
            batched=batching.counts,
        )

    def _stored(self, piece: Piece) -> list[Weight]:
        """The large weights of a fragment."""
        found = (self._graph.weights.get(name) for name in piece.weights)
        return [each for each in found if each is not None and is_stored(each)]

    def _wholes(self, stored: Sequence[Weight]) -> Iterable[Weight]:
        """The weights without parts of others; all parts of one are that one."""
        names = {each.tensor.name for each in stored}
        parts = Counter[str]()
        for each in stored:
            if each.whole and each.whole not in names:
                parts[each.whole] += each.bytes
        complete = {name for name, size in parts.items() if size == self._graph.weights[name].bytes}
        yield from (each for each in stored if each.whole not in names | complete)
        yield from (self._graph.weights[name] for name in sorted(complete))

    def _weight_files(self, stored: Sequence[Weight]) -> dict[str, WeightFile]:
        """The files that a fragment with these weights lists, by name."""
        used = {each.tensor.name for each in self._wholes(stored)}
        shared = [each for each in self._shared if not used.isdisjoint(each.offsets())]
        files = {shared_name(number): each for number, each in enumerate(shared)}
        elsewhere = {name for each in shared for name in each.offsets()}
        names = {each.tensor.name for each in stored}
        own = [
            each
            for each in stored
            if each.tensor.name not in elsewhere and each.whole not in names | elsewhere
        ]
        return files | ({WEIGHTS: WeightFile.of(own, self._sources)} if own else {})


def _places(stored: Sequence[Weight], files: Mapping[str, WeightFile]) -> Iterable[Place]:
    """Where each weight is: by itself, or in the one of which it is a part."""
    known = {
        weight.tensor.name: (weight, Place(name, offset))
        for name, file in files.items()
        for weight, offset in file.weights
    }
    for each in stored:
        if each.tensor.name in known:
            yield known[each.tensor.name][1]
        else:
            whole, place = known[each.whole]
            yield Place(place.file, place.offset + offset_inside(each, whole))


def _beside_bytes(profile: Profile, piece: Piece) -> int:
    """The most that a node takes outside of the arena, of those that take it for sure: what others
    are reckoned with is as much as values may ask for."""
    nodes = [profile.nodes[position] for position in piece.nodes]
    return max((each.beside_bytes for each in nodes if _has_sizes(profile, each)), default=0)


def _has_sizes(profile: Profile, node: NodeProfile) -> bool:
    """Whether the sizes of all its outputs follow from the planned shapes."""
    known = (profile.tensors.get(name) for name in node.outputs)
    return all(each is None or each.bytes is not None for each in known)


def _largest(profile: Profile, inputs: Sequence[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """The largest shapes that are planned for, of inputs whose sizes the graph leaves open."""
    sizes = {each.name: profile.tensors[each.name].sizes for each in inputs}
    return {
        spec.name: known
        for spec in inputs
        if (known := sizes[spec.name]) is not None and known != spec.shape
    }


def _seen(
    profile: Profile, learned: Profile, inputs: Sequence[TensorSpec]
) -> dict[str, tuple[int, ...]]:
    """The sizes of inputs that only what items have shown tells."""
    return {
        spec.name: sizes
        for spec in inputs
        if profile.tensors[spec.name].sizes is None
        and (sizes := learned.tensors[spec.name].sizes) is not None
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
