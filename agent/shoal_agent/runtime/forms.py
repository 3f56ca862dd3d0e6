"""What of a fragment is prepared: it as a whole, or its blocks, and what that takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_agent.runtime.blocks import Blocks
from shoal_agent.runtime.described import dequantises
from shoal_agent.runtime.external_data import half_bytes, mapped_bytes, saved_bytes
from shoal_agent.runtime.prepared import Prepared
from shoal_protocol.manifest import BLOCKS, MODEL, is_shared, weight_files
from shoal_protocol.preparing import LEAST_WEIGHT_FACTOR, PROCESS_BYTES

WHOLE: Final = "whole"
IN_BLOCKS: Final = "blocks"
_GRAPH_FACTOR: Final = 12
"""Memory for a graph while it is optimised, over the size of its file; trees need most."""
_HALF_FACTOR: Final = 6.25
_WEIGHT_FACTORS: Final[tuple[float, ...]] = (4.25, 2.125, LEAST_WEIGHT_FACTOR)
"""Memory to save a model, over its weights: half precision is converted, and copied once more where
one weight is most of the model; tables that are also multiplied are transposed, most others are
copied once. As much as can be had is best. What is not read is copied once."""
_SPARE_BYTES: Final = 4 << 20
_SECONDS: Final = 120.0
_BYTES_PER_SECOND: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The models to open: a fragment whole, or its blocks."""

    name: str
    file: Path
    ranges: tuple[tuple[int, int], ...]
    model_bytes: int
    weights: tuple[int, ...]
    """Bytes of each model's that are read."""
    unread: tuple[int, ...]
    """Those of each model's that are not: of tables, whose rows items read."""
    stored_bytes: int
    """Those of all weights."""
    dequantises: tuple[bool, ...]
    """Whether each model would have copies of quantised weights, unless it dequantises them."""
    saved: bool
    """Whether to save it."""
    results: tuple[str, ...] = ()
    """What the fragment gives, where the models are its blocks."""
    tables: frozenset[str] = frozenset()
    """Weights that the models have not: the agent reads their rows from the fragment's files."""

    def of(self, prepared: Prepared) -> object | None:
        return prepared.whole if self.name == WHOLE else prepared.blocks

    @property
    def trial_bytes(self) -> int:
        return PROCESS_BYTES + _GRAPH_FACTOR * self.model_bytes

    def needs(self) -> tuple[int, ...]:
        """Memory to prepare one model after the other, what suffices always, often, sometimes; and
        to try them. Raises `OSError`."""
        if not self.saved:
            return (self.trial_bytes,)
        factors = _WEIGHT_FACTORS
        if half_bytes(self._model(), self.tables):
            factors = (_HALF_FACTOR, *factors)
        return (*map(self._saving_bytes, factors), self.trial_bytes)

    @property
    def least_saving_bytes(self) -> int:
        return self._saving_bytes(LEAST_WEIGHT_FACTOR)

    def _saving_bytes(self, factor: float) -> int:
        pairs = zip(self.weights, self.unread, strict=True)
        return self.trial_bytes + max(int(factor * read) + unread for read, unread in pairs)

    def disk_bytes(self) -> int:
        """Weights as they are, or as floats, and packed ones, which are a little larger. Raises
        `OSError`."""
        graphs = 4 * len(self.weights) * self.model_bytes
        plain = saved_bytes(self._model(), self.tables)
        halves = half_bytes(self._model(), self.tables)
        packed = (self.stored_bytes + halves) * 5 // 4
        return plain + halves + packed + graphs + _SPARE_BYTES

    def _model(self) -> bytes:
        return self.file.with_name(MODEL).read_bytes()

    @property
    def seconds(self) -> float:
        return _SECONDS + self.stored_bytes / _BYTES_PER_SECOND


def whole_form(fragment: Path) -> Form:
    """Raises `FragmentDamaged`, `OSError`."""
    return Form(
        name=WHOLE,
        file=fragment / MODEL,
        ranges=(),
        model_bytes=(fragment / MODEL).stat().st_size,
        weights=(_weights_bytes(fragment),),
        unread=(0,),
        stored_bytes=_weights_bytes(fragment),
        dequantises=(dequantises(fragment),),
        saved=_is_saved(fragment),
    )


def blocks_form(fragment: Path, source: Blocks) -> Form:
    """Raises `OSError`."""
    weights = tuple(block.weight_bytes for block in source.blocks)
    unread = tuple(
        max(0, mapped_bytes(model) - read)
        for read, model in zip(weights, source.models(), strict=True)
    )
    stored_bytes = _weights_bytes(fragment)
    if source.tables:  # which other blocks may have parts of
        stored_bytes = min(stored_bytes, sum(weights) + sum(unread))
    return Form(
        name=IN_BLOCKS,
        file=fragment / BLOCKS,
        ranges=tuple((block.model_offset, block.model_bytes) for block in source.blocks),
        model_bytes=max(block.model_bytes for block in source.blocks),
        weights=weights,
        unread=unread,
        stored_bytes=stored_bytes,
        dequantises=tuple(block.dequantises for block in source.blocks),
        saved=_is_saved(fragment),
        results=source.outputs,
        tables=frozenset(source.tables),
    )


def _weights_bytes(fragment: Path) -> int:
    return sum(each.stat().st_size for each in weight_files(fragment))


def _is_saved(fragment: Path) -> bool:
    """Whether to have a packed copy of the weights: not of what is mostly the weights of other
    fragments too, which are mapped once for all of them as they are."""
    own = sum(each.stat().st_size for each in weight_files(fragment) if not is_shared(each.name))
    return 2 * own >= _weights_bytes(fragment)
