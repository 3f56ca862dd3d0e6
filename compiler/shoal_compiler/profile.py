"""ONNX file -> `shoal_planner.profile.Profile`. Weights are read once only, for the digest."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import is_
from pathlib import Path
from typing import NamedTuple

from shoal_compiler.bands import Bands
from shoal_compiler.branches import find_guards, open_branches
from shoal_compiler.graph import Graph, normalise
from shoal_compiler.order import choose_order, roles
from shoal_compiler.parting import KnownShapes
from shoal_compiler.picks import pick_weights
from shoal_compiler.profiler import Profiler, declared_input
from shoal_compiler.safety import CheckedModel, open_model
from shoal_compiler.scopes import set_apart
from shoal_compiler.shapes import Shapes, infer
from shoal_compiler.single_precision import outputs_apart
from shoal_compiler.slicing import SLICE_BYTES, slice_layers
from shoal_compiler.tables import gather_first
from shoal_compiler.weight_files import Digests
from shoal_compiler.windows import in_windows
from shoal_compiler.work import Setting
from shoal_planner.profile import Profile
from shoal_protocol.digests import Digest, digest_of_file, digest_of_model
from shoal_protocol.partition import TensorSpec
from shoal_protocol.seen_sizes import Sizes


@dataclass(frozen=True)
class Source:
    """A model's files, checked, and its graph: read once, however often it is profiled and cut.
    `slicing`: how fine the parts are that its layers are in; `find_shapes` gives those of
    tensors, as far as they are known, for the inputs that it is `fitted_to` (sizes that items were
    seen to have are the second), and `bands` the graph in bands for them. `weight_digests` are
    remembered from one cut to the next."""

    model: CheckedModel
    whole: Graph
    find_digests: Callable[[], Mapping[Path, Digest]]
    find_shapes: KnownShapes
    bands: Bands
    slicing: int = 0
    fitted_to: tuple[Mapping[str, Sequence[int]], Sizes] = ({}, {})
    weight_digests: Digests = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "Source":
        """Read and check a model. Raises `ModelRefused`."""
        model = open_model(Path(path))
        graph = open_branches(set_apart(normalise(model)))
        whole = outputs_apart(gather_first(pick_weights(graph)))
        shapes = cache(partial(_shapes, whole, {}, None))
        return cls(model, whole, cache(partial(_digests, model)), shapes, Bands(whole, shapes))

    def fitted(self, shapes: Mapping[str, Sequence[int]], seen: Sizes | None = None) -> "Source":
        """The same model, whose layers are parted for inputs of these shapes, and sizes that items
        were seen to have (`profile`)."""
        found = cache(partial(_shapes, self.whole, shapes, seen))
        bands = Bands(self.whole, found)
        return replace(self, find_shapes=found, bands=bands, fitted_to=(shapes, seen or {}))

    @cached_property
    def graph(self) -> Graph:
        """The graph with its largest layers in parts."""
        most = self._level.part_bytes
        windows = in_windows(self.banded, most, self.find_shapes)
        return find_guards(slice_layers(windows, most, self.find_shapes))

    @cached_property
    def banded(self) -> Graph:
        """The graph with runs of nodes that work in much in bands; `whole`: there are none."""
        most = self._level.works_in_bytes
        return self.whole if most is None else self.bands.within(most)

    @property
    def _level(self) -> "_Level":
        return _levels()[self.slicing]

    def sliced(self, slicing: int) -> "Source":
        """The same model with its largest layers in parts of another size."""
        return replace(self, slicing=slicing)

    def slicings(self) -> "Iterator[Source]":
        """The model with its largest layers in smaller and smaller parts, then what it computes in
        bands as well, as far as that makes a difference; itself first."""
        yield (last := self)
        for slicing in range(self.slicing + 1, len(_levels())):
            found = self.sliced(slicing)
            alike = found._level.works_in_bytes is not None and found.banded is self.whole
            if not alike and found.graph != last.graph:
                yield (last := found)

    @property
    def path(self) -> Path:
        """The ONNX file."""
        return self.model.path

    @cached_property
    def digests(self) -> tuple[Digest, Digest]:
        """The ONNX file's digest, and the model's (`Profile.digest`)."""
        own, external = self.files[self.model.path], self.model.external
        return own, digest_of_model(own, {name: self.files[external[name]] for name in external})

    @property
    def files(self) -> Mapping[Path, Digest]:
        """All files of the model with their digests; the ONNX file is the first."""
        return self.find_digests()

    def inputs(self, shapes: Mapping[str, Sequence[int]]) -> tuple[TensorSpec, ...]:
        """Those of the profile for these shapes, which is made only where the model does not say
        them itself. Raises `ModelRefused`."""
        declared = [declared_input(each) for each in self.whole.inputs]
        found = tuple(each for each in declared if each is not None)
        return found if len(found) == len(declared) else self.profile(shapes).inputs

    def profile(
        self, shapes: Mapping[str, Sequence[int]] | None = None, seen: Sizes | None = None
    ) -> Profile:
        """Profile the model; `shapes` gives inputs with dynamic axes their assumed sizes, `seen`
        tensors inside the model those that an item had there.

        Bytes and FLOPs that depend on an axis that stays dynamic are None. Raises `ModelRefused`,
        also for a model with inputs or outputs that are no tensors.
        """
        known = self.known_shapes(shapes or {}, seen)
        profiler = Profiler.of(self.graph, shapes or {}, seen, known)
        return profiler.profile(self.model, *self.digests)

    def known_shapes(
        self, shapes: Mapping[str, Sequence[int]], seen: Sizes | None
    ) -> Shapes | None:
        """Those of the whole graph, where none of its layers is in parts; None: of others."""
        nodes, whole = self.graph.nodes, self.whole.nodes
        is_whole = len(nodes) == len(whole) and all(map(is_, nodes, whole))
        fits = self.fitted_to == (shapes, seen or {}) and not self.whole.opened
        return self.find_shapes() if is_whole and fits else None

    def settings(self, shapes: Mapping[str, Sequence[int]]) -> tuple[Setting, ...]:
        """Each node of the whole graph among its neighbours, as the estimate of work sees it."""
        profiler = Profiler.of(self.whole, shapes)
        return tuple(profiler.setting(index) for index in range(len(self.whole.nodes)))


def _shapes(graph: Graph, shapes: Mapping[str, Sequence[int]], seen: Sizes | None) -> Shapes:
    node_roles = roles(graph)
    return infer(graph, choose_order(graph, node_roles), node_roles, shapes, seen)


def profile_model(path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Profile:
    """`Source.profile`, of a model that is needed for nothing else."""
    return Source.open(path).profile(shapes)


def digest_at(path: Path) -> Digest:
    """The digest of a file. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        return digest_of_file(file)


def _digests(model: CheckedModel) -> Mapping[Path, Digest]:
    return {path: digest_at(path) for path in model.files}


class _Level(NamedTuple):
    """How large parts of layers are at most, and what a node may work in that is in no bands."""

    part_bytes: int
    works_in_bytes: int | None = None


def _levels() -> list[_Level]:
    """Each for devices that can hold nothing of those before it. Of bands some rows are computed
    twice, so they come last."""
    return [*map(_Level, SLICE_BYTES), *(_Level(most, most) for most in SLICE_BYTES)]
