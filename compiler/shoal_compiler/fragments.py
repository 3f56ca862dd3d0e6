"""One fragment as files: model.onnx, weights.bin, files of weights that it shares with others,
blocks.bin and fragment.json, named by what they hold.

`fragment.json` is a pure function of the sub-graph and of what is shared: it holds the digests of
the other files, and its own digest is the fragment's name. So all digests are known before anything
is written, and show whether the fragment exists already. Blocks refer to the same weights.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import onnx

from shoal_compiler.blocks import Blocks, dequantises
from shoal_compiler.errors import ModelRefused
from shoal_compiler.graph import Weight
from shoal_compiler.tensor_types import dtype_name
from shoal_compiler.weight_files import Place, Sources, WeightFile
from shoal_protocol.blocks import blocks_as_json, joins_as_json, least_bytes
from shoal_protocol.digests import Digest, digest_of
from shoal_protocol.durable_files import sync_folder
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import (
    BATCHED,
    BESIDE,
    BLOCKS,
    CHOOSES,
    DEQUANTISES,
    IN_ORDER,
    JOINS,
    LARGEST,
    MANIFEST,
    MAXIMUM_MANIFEST_BYTES,
    MODEL,
    SEEN,
    UNKNOWN_SIZES,
    VALUES,
    WEIGHTS,
    FileEntry,
    format_manifest,
)
from shoal_protocol.partition import TensorSpec
from shoal_protocol.shared_files import SharedFiles
from shoal_protocol.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class FragmentFiles:
    """A fragment, ready to be written.

    `weights` are its large ones, with their places in `weight_files`, which are by name. `inputs`
    and `outputs` are what it is sent and gives, `resident_bytes` its estimated memory. `largest`
    are the largest shapes of those inputs that can have several: a device that runs it with these
    before any work measures what it takes. `values` are of inputs that are a few integers, as they
    follow from these. `unknown_sizes`: not all sizes of activations do; `seen` are those of inputs
    that follow from what items have shown. `chooses`: it works out itself which branches run.
    `beside_bytes` is the most that a node takes outside of the runtime's arena. `in_order`: a
    device runs the nodes in the order of the file. `batched`: the positions of integers that grow
    with the number of items, by input and output that consists of such; None: it may not run
    several items at once.
    """

    model: onnx.ModelProto
    weights: Mapping[str, tuple[Weight, Place]]
    weight_files: Mapping[str, WeightFile]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    largest: Mapping[str, tuple[int, ...]]
    values: Mapping[str, tuple[int, ...]]
    unknown_sizes: bool
    chooses: bool
    seen: Mapping[str, tuple[int, ...]]
    weight_bytes: int
    resident_bytes: int
    beside_bytes: int
    in_order: bool
    blocks: Blocks
    batched: Mapping[str, tuple[int, ...]] | None

    @property
    def least_bytes(self) -> int:
        """The smallest budget of a device that swaps."""
        return least_bytes(self.blocks.blocks) if self.blocks.blocks else self.resident_bytes

    @property
    def gathered_bytes(self) -> int:
        """Of the tables of which such a device reads rows, and nothing else."""
        blocks = self.blocks.blocks
        tables = {each.table for block in blocks for each in block.gathers}
        tables -= {weight.whole for weight, _ in self.weights.values()}  # its parts are read
        return sum(self.weights[name][0].bytes for name in tables)

    @property
    def digest(self) -> Digest:
        """The fragment's name. Raises `ModelRefused`."""
        return digest_of(self._manifest)

    def write(self, store: Path, sources: Sources) -> None:
        """Write to `store/fragments/DIGEST/`, or find it there, whole; what is there and is not
        right, byte by byte, is replaced. Raises `ModelRefused`."""
        if not FragmentStore(store).is_sound(self.digest):
            self._write(store, FragmentStore(store).folder(self.digest), sources)

    @cached_property
    def _contents(self) -> Mapping[str, bytes]:
        contents = {MODEL: self.model.SerializeToString(deterministic=True)}
        return contents | ({BLOCKS: self.blocks.content} if self.blocks.blocks else {})

    @cached_property
    def _manifest(self) -> bytes:
        files = {
            name: FileEntry(digest=digest_of(each), size_bytes=len(each))
            for name, each in self._contents.items()
        }
        files |= {name: each.entry for name, each in self.weight_files.items()}
        description: dict[str, object] = {
            "inputs": [asdict(each) for each in self.inputs],
            "outputs": [asdict(each) for each in self.outputs],
            "weight_bytes": self.weight_bytes,
            "resident_bytes": self.resident_bytes,
            IN_ORDER: self.in_order,
            "initializers": {
                name: _described(weight, place) for name, (weight, place) in self.weights.items()
            },
        }
        described = {LARGEST: self.largest, VALUES: self.values, SEEN: self.seen}
        for key, sizes in described.items():
            if sizes:
                description[key] = {name: list(each) for name, each in sizes.items()}
        known = {
            UNKNOWN_SIZES: self.unknown_sizes,
            CHOOSES: self.chooses,
            BESIDE: self.beside_bytes,
            DEQUANTISES: dequantises(self.model.graph),
        }
        description |= {key: value for key, value in known.items() if value}
        if self.batched is not None:
            description[BATCHED] = {name: list(each) for name, each in self.batched.items()}
        if self.blocks.blocks:
            description["blocks"] = blocks_as_json(self.blocks.blocks)
        if self.blocks.joins:
            description[JOINS] = joins_as_json(self.blocks.joins)
        manifest = format_manifest(files, description)
        if len(manifest) > MAXIMUM_MANIFEST_BYTES:
            raise ModelRefused(
                f"makes a fragment with {len(self.weights)} weights, whose {MANIFEST} would "
                f"have {format_bytes(len(manifest))}; at most "
                f"{format_bytes(MAXIMUM_MANIFEST_BYTES)} are taken: cut it into more fragments"
            )
        return manifest

    def _write(self, store: Path, target: Path, sources: Sources) -> None:
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        shared = SharedFiles(store)
        for name, file in self.weight_files.items():
            if name == WEIGHTS:
                file.write(part / name, sources)
            elif not shared.link(file.entry, part / name):
                file.write(part / name, sources)
                shared.keep(file.entry.digest, part / name)
        for name, content in {**self._contents, MANIFEST: self._manifest}.items():
            with (part / name).open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
        sync_folder(part)
        sources.check_unchanged()
        if target.exists():  # damaged; out of the way as a whole, as a killed cut would leave it
            damaged = target.with_name(f"{target.name}.damaged.part")
            shutil.rmtree(damaged, ignore_errors=True)
            target.rename(damaged)
            part.rename(target)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            part.rename(target)
        sync_folder(target.parent)


def _described(weight: Weight, place: Place) -> dict[str, object]:
    described: dict[str, object] = {
        "dtype": dtype_name(weight.tensor.data_type),
        "shape": list(weight.tensor.dims),
        "offset": place.offset,
        "bytes": weight.bytes,
    }
    return described if place.file == WEIGHTS else {**described, "file": place.file}
