"""Is the result the whole model's? A step of its own (see `steps`).

The whole model is loaded as anybody would load it, from its path with ONNX Runtime's default
settings, and run over the same inputs, one item at a time, each compared with what the job wrote.
So neither inputs nor results need to fit in memory. Items without a result (they failed) are
skipped.

ONNX Runtime's optimisations change the model's rounding, and agents run without some of them. A
quantised model may make much of that: a value that is rounded the other way is a whole step off.
How far the whole model differs from itself is measured too: the default session against one with
the options of agents, and one without any optimisation, over `_REFERENCE_ITEMS` of the items and
the worst one. Half of these are of the items that differ, if some do: a result that equals the
whole model under other options is right (`Verification.matches_other_options`). Devices open
fragments in different ways, so a result may equal none of them: then a difference as large as the
model's own cannot be told from it (`Verification.own_rounding`).

Models with numbers of half precision round to these, at places that depend on how they are run:
what two of their units make of a difference is no difference (`rounding`).
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shoal_cli.local.report import Verification
from shoal_cli.local.steps import Json, Progress, run_step, serve
from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.arrays import ArrayFile
from shoal_coordinator.storage.inputs import InputSet, InputsRefused, InputUnsuitable, scan_inputs
from shoal_coordinator.storage.made_files import row_name
from shoal_coordinator.storage.parts import ROWS
from shoal_protocol.copying import copied
from shoal_protocol.partition import document_from_json

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

DEFAULT_TOLERANCE: Final = 1e-4
_REFERENCE_ITEMS: Final = 16
_REFERENCES: Final = ("agents", "unoptimised")
_MODULE: Final = "shoal_cli.local.verification"
_PATHS: Final = ("model", "partition", "inputs", "outputs")


class VerificationRefused(Exception):
    """There is nothing to compare, or the whole model does not load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRequest:
    """What to compare: a model's file, its `partition.json`, inputs and results; of the items so
    many, evenly spread, or all. `threads` are those of an agent: some kernels divide their work by
    them, and round otherwise then."""

    model: Path
    partition: Path
    inputs: Path
    outputs: Path
    tolerance: float
    most_items: int | None = None
    threads: int = 1


@dataclass(slots=True)
class Comparison:
    """Differences so far. Arrays that cannot be subtracted (`comparable`) count as mismatched. Of
    the items that were added, `worst` is the number of the worst, `worst_item` its place, and
    `different` are the numbers of those that are mismatched or differ by more than `tolerance`; of
    the others among these `shares` says by how much, as a part of an output's largest number."""

    tolerance: float = DEFAULT_TOLERANCE
    items: int = 0
    mismatched: int = 0
    agreements: int = 0
    max_abs_diff: float = 0.0
    max_rel_diff: float = 0.0
    worst: int = 0
    worst_item: str = ""
    different: list[int] = field(default_factory=list)
    shares: dict[int, float] = field(default_factory=dict)

    def forgive(self, share: float) -> int:
        """Take those for equal that differ by no more than that; how many they are."""
        near = {item for item, found in self.shares.items() if found <= share}
        self.different = [item for item in self.different if item not in near]
        return len(near)

    def add(self, place: str, expected: Arrays, actual: Arrays) -> None:
        """Take one item in; `place` is what a person calls it."""
        item, self.items = self.items, self.items + 1
        found = differences(expected, actual)
        if found is None or found[1] > self.tolerance:
            self.different.append(item)
        if found is None:
            if not self.mismatched:
                self.worst, self.worst_item = item, place
            self.mismatched += 1
            return
        self.agreements += all(_same_maxima(expected[name], actual[name]) for name in expected)
        absolute, relative = found
        if relative > self.tolerance:
            self.shares[item] = _share(expected, actual, self.tolerance)
        if relative > self.max_rel_diff and not self.mismatched:
            self.worst, self.worst_item = item, place
        self.max_abs_diff = max(self.max_abs_diff, absolute)
        self.max_rel_diff = max(self.max_rel_diff, relative)


def differences(expected: Arrays, actual: Arrays) -> tuple[float, float] | None:
    """The largest `difference` of an item's outputs; None where one is missing or cannot be
    subtracted."""
    pairs = [(expected[name], actual[name]) for name in expected if name in actual]
    if len(pairs) < len(expected) or not all(comparable(one, two) for one, two in pairs):
        return None
    found = [difference(one, two) for one, two in pairs]
    return (
        max((absolute for absolute, _ in found), default=0.0),
        max((relative for _, relative in found), default=0.0),
    )


def comparable(expected: Array, actual: Array) -> bool:
    """Same shape, type and text, and not finite at the same places, in the same way."""
    if expected.shape != actual.shape or _kind(expected) != _kind(actual):
        return False
    if expected.dtype.kind not in "fciub":
        return bool(np.array_equal(expected.astype(np.str_), actual.astype(np.str_)))
    if expected.dtype.kind not in "fc":
        return True
    odd = ~np.isfinite(expected)
    if not np.array_equal(odd, ~np.isfinite(actual)):
        return False
    return bool(np.array_equal(expected[odd], actual[odd], equal_nan=True))


def _kind(array: Array) -> str:
    """Text is of one as the runtime gives it, and of another in files."""
    return array.dtype.kind.replace("O", "U")


def difference(expected: Array, actual: Array) -> tuple[float, float]:
    """Largest |difference|, and |difference| / (1 + |expected|), of `comparable` arrays."""
    if expected.dtype.kind not in "fciub" or expected.size == 0:
        return 0.0, 0.0
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    finite = np.isfinite(expected)
    one, two = expected[finite].astype(wide), actual[finite].astype(wide)
    absolute = np.abs(one - two)
    if absolute.size == 0:
        return 0.0, 0.0
    return float(absolute.max()), float((absolute / (1.0 + np.abs(one))).max())


def _share(expected: Arrays, actual: Arrays, tolerance: float) -> float:
    """The largest difference of outputs of floats beyond the tolerance, as a part of the output's
    largest number; infinite where others differ, which are not rounded."""
    worst = 0.0
    for name, array in expected.items():
        absolute, relative = difference(array, actual[name])
        if relative <= tolerance:
            continue
        largest = np.abs(array[np.isfinite(array)].astype(np.float64)).max()
        rounded = array.dtype.kind == "f" and largest > 0
        worst = max(worst, absolute / float(largest) if rounded else math.inf)
    return worst


def _same_maxima(expected: Array, actual: Array) -> bool:
    if expected.dtype.kind not in "fiub" or expected.ndim == 0 or expected.size == 0:
        return True
    return bool(np.array_equal(expected.argmax(axis=-1), actual.argmax(axis=-1)))


async def verify(request: VerificationRequest, on_progress: Progress) -> Verification:
    """Run the comparison in a process of its own. Raises `StepRefused` or `StepCrashed`."""
    return Verification(**await run_step("verification", _MODULE, asdict(request), on_progress))


def _work(message: Json, on_progress: Progress) -> Json:
    paths = {name: Path(message[name]) for name in _PATHS}
    return asdict(compare(VerificationRequest(**{**message, **paths}), on_progress))


def compare(request: VerificationRequest, on_progress: Progress) -> Verification:
    """The comparison itself, in this process. Raises `VerificationRefused`, and what reading inputs
    and results raises."""
    document = document_from_json(request.partition.read_bytes())
    inputs = scan_inputs(request.inputs, document.inputs, fixed=document.fixed)
    names = [spec.name for spec in document.outputs]
    with (
        contextlib.closing(inputs),
        contextlib.closing(_Results(request.outputs, inputs, len(names))) as results,
    ):
        return _compare(request, names, inputs, results, on_progress)


def _compare(
    request: VerificationRequest,
    names: Sequence[str],
    inputs: InputSet,
    results: "_Results",
    on_progress: Progress,
) -> Verification:
    # Loaded in this process alone: the runner has no use for ONNX Runtime.
    from shoal_cli.local.rounding import apart_by_rounding  # noqa: PLC0415
    from shoal_cli.local.whole_model import ModelUnusable, WholeModel  # noqa: PLC0415
    from shoal_compiler.errors import ModelRefused  # noqa: PLC0415

    present = [item for item in range(len(inputs)) if results.has(item)]
    compared = _spread(present, request.most_items or len(present))
    comparison, reference = Comparison(request.tolerance), Comparison(request.tolerance)
    matched: set[int] = set()
    started = time.monotonic()
    try:
        whole = WholeModel(request.model)
        for done, item in enumerate(compared, 1):
            expected = whole.run(names, inputs.read(item))
            comparison.add(inputs.place(item), expected, results.read(item, expected))
            on_progress(done, len(compared))
        floor_bytes, peak_bytes = whole.floor_bytes, whole.peak_bytes if compared else 0
        apart = apart_by_rounding(request.model) if comparison.shares else 0.0
        rounded = comparison.forgive(apart)
        different = {compared[number] for number in comparison.different}
        sample = _reference_items(compared, comparison)
        by_default = {item: whole.run(names, inputs.read(item)) for item in sample}
        del whole  # two whole models at once may be more than the machine has
        for item, outputs in _by_other_ways(request, names, inputs, sample):
            reference.add(inputs.place(item), by_default[item], outputs)
            if item in different:
                found = differences(outputs, results.read(item, outputs))
                if found is not None and found[1] <= request.tolerance:
                    matched.add(item)
    except (ModelUnusable, ModelRefused) as error:
        raise VerificationRefused(f"the whole model does not run: {error}") from error
    return copied(
        Verification,
        comparison,
        of_items=len(present),
        skipped=len(inputs) - len(present),
        different_items=len(different),
        rounded_items=rounded,
        matched_items=len(matched),
        reference_items=min(len(sample), reference.items),
        reference_abs_diff=reference.max_abs_diff,
        reference_rel_diff=reference.max_rel_diff,
        floor_bytes=floor_bytes,
        peak_bytes=peak_bytes,
        seconds=time.monotonic() - started,
    )


def _by_other_ways(
    request: VerificationRequest, names: Sequence[str], inputs: InputSet, items: Sequence[int]
) -> Iterator[tuple[int, Arrays]]:
    """What the whole model gives for these items with other options; nothing with those with which
    it does not run: a kernel may be missing for what they make of it."""
    from shoal_cli.local.whole_model import ModelUnusable, Way, WholeModel  # noqa: PLC0415

    for way in map(Way, _REFERENCES):
        threads = request.threads if way is Way.AGENTS else None
        with contextlib.suppress(ModelUnusable):
            other = WholeModel(request.model, way, threads=threads)
            for item in items:
                yield item, other.run(names, inputs.read(item))
            del other


def _spread(items: Sequence[int], most: int) -> list[int]:
    """So many of these at most, evenly spread, the first among them."""
    count = min(len(items), most)
    return [items[place * len(items) // count] for place in range(count)]


def _reference_items(compared: Sequence[int], comparison: Comparison) -> list[int]:
    """Some of the items, the worst among them; half of them differ, if so many do."""
    different = [compared[number] for number in comparison.different]
    worst = compared[comparison.worst : comparison.worst + 1]
    chosen = {*_spread(different, _REFERENCE_ITEMS // 2), *worst}
    others = [item for item in compared if item not in chosen]
    return sorted({*chosen, *_spread(others, _REFERENCE_ITEMS - len(chosen))})


class _Results:
    """The result files, one open at a time: items come in order. See `storage.results` for their
    form."""

    def __init__(self, folder: Path, inputs: InputSet, outputs: int) -> None:
        """`outputs` is how many the model has."""
        self._folder = folder
        self._inputs = inputs
        self._outputs = outputs
        self._number = -1
        self._file: ArrayFile | None = None
        self._places: dict[int, int] | None = None

    def has(self, item: int) -> bool:
        """Whether the item has a result."""
        row = self._open(item)
        return self._file is not None and (self._places is None or row in self._places)

    def read(self, item: int, expected: Arrays) -> Arrays:
        """The item's outputs, as far as the file has them; rows take the ranks of `expected`."""
        row = self._open(item)
        assert self._file is not None, "asked for an item without a result"
        headers = self._file.headers
        if self._inputs.files[self._number].contents.stacked is None:
            return {name: self._file.read(name) for name in expected if name in headers}
        found: dict[str, Array] = {}
        place = row if self._places is None else self._places[row]
        for name, array in expected.items():
            if name in headers:
                rows = self._file.read(name, slice(place, place + 1))
                found[name] = rows if rows.ndim == array.ndim else rows[0]
            elif (own := row_name(name, row, expected)) in headers:
                found[name] = self._file.read(own)
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, item: int) -> int:
        """Have the item's file open, if it exists; the item's row there."""
        number, row = self._inputs.locate(item)
        if number == self._number:
            return row
        self.close()
        self._number, self._places = number, None
        path = self._folder / f"{Path(self._inputs.files[number].name).stem}.npz"
        if path.exists():
            # Rows that differ in their shapes are arrays of their own.
            arrays = self._outputs * max(1, self._inputs.files[number].items) + 1
            self._file = ArrayFile(path, limits=Limits(members=arrays))
            if ROWS in self._file.headers:
                present = self._file.read(ROWS).tolist()
                self._places = {row: place for place, row in enumerate(present)}
        return row


def main() -> None:
    """As a step."""
    serve(_work, (VerificationRefused, InputsRefused, InputUnsuitable, UnreadableArrays))
