"""Prepared models on disk: what a child process saved of a fragment, verified before it is used.

```
fragments/DIGEST/prepared/KEY/prepared.json, 0/model.onnx, 0/weights.bin, 1/...
```

One folder for each model: the fragment's own, or each of its blocks. KEY depends on all that the
bytes depend on besides the fragment: the runtime's version, this processor, and the form. The
folder has its final name when it is whole. It is part of the fragment's folder, so that it goes
with it.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.cache.folders import PREPARED_FOLDER, file_digest
from shoal_agent.runtime.mapped_pages import read_in_huge_pages
from shoal_agent.runtime.prepare_child import MANIFEST
from shoal_agent.runtime.recipes import PREPARED, PREPARED_UNPACKED, Recipe
from shoal_protocol.digests import from_hexadecimal
from shoal_protocol.manifest import MODEL, WEIGHTS
from shoal_protocol.page_cache import read_in_small_pages

_VERSION: Final = "11"
"""Another one for other options in `recipes`, other sessions' bytes, or another manifest."""
_MOST_MANIFEST_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 64 << 10
"""A model may have so much more than before, however small its weights are."""
_REORDERED_SHARE: Final = 2
"""Text detection takes 76 MiB prepared and 60 as it is; its convolutions gain the most by it."""
_PROCESSOR_FIELDS: Final = ("model name", "flags", "Features", "CPU implementer", "CPU part")
"""Of /proc/cpuinfo, on x86 and on ARM."""


class PreparedDamaged(Exception):
    """A prepared form is not what was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a prepared model takes that is opened in one way: at most while it is opened, what
    remains of that in anonymous memory, and how much more that is, with the weights that it reads
    from its mapping, than the weights of the model as it is (less than zero: it is less)."""

    opening_bytes: int
    anonymous_bytes: int
    growth_bytes: int

    @property
    def mapped_growth(self) -> int:
        """How much more it maps."""
        return self.growth_bytes - self.anonymous_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """An optimised model, to be opened from its path; `weights` is beside it.

    Packed weights that ONNX Runtime cannot save remain in anonymous memory when it is opened with
    packing: quantised convolutions, recurrent networks. `reads_rows`: it has a table of which items
    read rows.
    """

    model: Path
    weights: Path
    reads_rows: bool
    packed: Opened
    unpacked: Opened

    def recipe_for_whole(
        self, weight_bytes: int, granted_bytes: int | None, spare_bytes: int | None = None
    ) -> Recipe | None:
        """How to open it where all of it stays in memory, beside so many `spare_bytes` that are not
        granted (None: as many as it takes); None: it would take too much.

        It may have more than the model as it is by an eighth of the weights, for they are padded,
        or by half of what is granted for other things: half precision that is converted once, and
        saved, is not converted in each run. Its nodes run in an order of the runtime's, and their
        values change their layout on the way, so activations take more than was planned.
        """
        beside = max(0, (granted_bytes or 0) - weight_bytes)
        reordered = beside // _REORDERED_SHARE if beside > weight_bytes else 0
        # A grant of all that there is exceeds the arena's limit, which is rounded down.
        if spare_bytes is not None and reordered > max(0, spare_bytes):
            return None
        growth = max(weight_bytes // 8, beside // 2, _SPARE_BYTES)
        for recipe, opened in ((PREPARED, self.packed), (PREPARED_UNPACKED, self.unpacked)):
            opens = granted_bytes is None or opened.opening_bytes <= granted_bytes
            if opens and opened.growth_bytes <= growth:
                return recipe
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What there is of a fragment: its model, its blocks."""

    whole: PreparedModel | None = None
    blocks: tuple[PreparedModel, ...] | None = None


NOTHING_PREPARED: Final = Prepared()


def key(form: str) -> str:
    """The name of a form's folder on this device, with this runtime."""
    parts = (_VERSION, onnxruntime.__version__, _processor(), form)
    return sha256("\n".join(parts).encode()).hexdigest()[:32]


@cache
def _processor() -> str:
    """What this processor is and can do, as far as the kernel says."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in _PROCESSOR_FIELDS:
                    found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return f"{platform.machine()} {sorted(found.items())}"


def folder_of(fragment: Path, form: str) -> Path:
    """Where a fragment's prepared form is, or would be."""
    return fragment / PREPARED_FOLDER / key(form)


Stamps = tuple[tuple[int, int, int, int], ...]
"""Inode, size and times of change of a form's files."""


def stamps_of(models: Sequence[PreparedModel]) -> Stamps:
    """Raises `OSError`."""
    states = [path.stat() for each in models for path in (each.model, each.weights)]
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states)


def read_prepared(
    folder: Path, form: str, count: int, verified: Stamps | None, *, huge_pages: bool
) -> tuple[PreparedModel, ...]:
    """The `count` models of a folder. They are verified by their digests, unless their files are
    the same as when they were verified; read in `huge_pages`, where there is room for those.

    Raises `FileNotFoundError` where there is none, `PreparedDamaged`, `OSError`.
    """
    with (folder / MANIFEST).open("rb") as file:
        digest, _, body = file.read(_MOST_MANIFEST_BYTES).partition(b"\n")
    if sha256(body).hexdigest().encode() != digest:
        raise PreparedDamaged(f"{folder / MANIFEST} does not match its digest")
    described = json.loads(body)  # by the child, whole
    if described["key"] != key(form) or len(described["models"]) != count:
        raise PreparedDamaged(f"{folder} is of another form")
    models = tuple(
        PreparedModel(
            model=folder / str(index) / MODEL,
            weights=folder / str(index) / WEIGHTS,
            reads_rows=each["reads_rows"],
            packed=Opened(**each["packed"]),
            unpacked=Opened(**each["unpacked"]),
        )
        for index, each in enumerate(described["models"])
    )
    if stamps_of(models) != verified:
        for model in models:
            if model.reads_rows:
                read_in_small_pages(model.weights)
            elif huge_pages:
                read_in_huge_pages(model.weights)
        for each in (path for model in models for path in (model.model, model.weights)):
            digest = described["models"][int(each.parent.name)]["files"][each.name]["sha256"]
            if file_digest(each) != from_hexadecimal(digest):
                raise PreparedDamaged(f"{each} does not match its digest")
    return models
