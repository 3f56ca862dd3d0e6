"""What is known of a model before it is cut: every fragment that could be, and what it would need.

A worker that has the model makes the table; a plan that has devices chooses from it. The model's
nodes are in one order, and a cut is a position in it. `tensors[n]` names a tensor directly behind
which cut `n` is made, so a choice of cuts is a list of names, as in the `cuts` of a Partition. What
a fragment needs depends on its two ends alone, never on the other cuts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal_protocol.digests import Digest, is_digest
from shoal_protocol.partition import Work

VERSION: Final = 1
MAX_CUTS: Final = 255
_MAX_NAME: Final = 4096
_MAX_COUNT: Final = 2**63 - 1
_NUMBERS: Final = 9
"""Of a candidate: three sizes, the FLOPs, three kinds of work, and two transfers."""


class TableRefused(ValueError):
    """A table is not what it should be; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fragment that could be.

    The first three are as in `partition.Fragment`; `least_bytes` is an estimate, since its blocks
    are known only when it is cut. An item brings `received_bytes` and takes away `sent_bytes`. What
    depends on an unknown shape is None.
    """

    weight_bytes: int
    resident_bytes: int
    least_bytes: int
    flops: int | None
    work: Work | None
    received_bytes: int | None
    sent_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTable:
    """`rows[start]` are the fragments that begin at a cut, by their end: the next cut is first.
    Cut 0 is the model's beginning, and the last one, which has no name, is its end."""

    model_digest: Digest
    tensors: tuple[str, ...]
    rows: tuple[tuple[Candidate, ...], ...]

    def __post_init__(self) -> None:
        cuts = len(self.tensors) + 1
        assert [len(row) for row in self.rows] == list(range(cuts, 0, -1)), "a table is a triangle"

    @property
    def end(self) -> int:
        """The number of the last cut, the model's end."""
        return len(self.rows)

    def candidate(self, start: int, end: int) -> Candidate:
        """The fragment between two cuts."""
        return self.rows[start][end - start - 1]

    def named(self, ends: Sequence[int]) -> tuple[str, ...]:
        """The tensors of cuts; the model's two ends have none."""
        return tuple(self.tensors[end - 1] for end in ends if 0 < end < self.end)

    def only(self, kept: Sequence[int]) -> "CutTable":
        """The table with these cuts alone, besides the model's ends."""
        ends = (0, *kept, self.end)
        return CutTable(
            model_digest=self.model_digest,
            tensors=self.named(ends),
            rows=tuple(
                tuple(self.candidate(start, end) for end in ends[place + 1 :])
                for place, start in enumerate(ends[:-1])
            ),
        )


def table_to_json(table: CutTable) -> str:
    """In one line."""
    value = {
        "version": VERSION,
        "model_digest": table.model_digest,
        "tensors": table.tensors,
        "rows": [[_numbers(each) for each in row] for row in table.rows],
    }
    return json.dumps(value, separators=(",", ":"))


def table_from_json(text: str | bytes) -> CutTable:
    """Read what `table_to_json` wrote. Raises `TableRefused`."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableRefused(f"not JSON ({error})") from error
    match parsed:
        case {
            "version": 1,
            "model_digest": str(digest),
            "tensors": list(tensors),
            "rows": list(rows),
        } if is_digest(digest) and len(tensors) <= MAX_CUTS:
            names = tuple(_name(each) for each in tensors)
            if len(set(names)) < len(names):
                raise TableRefused("a cut is named twice")
            read = tuple(_row(row, len(names) + 1 - start) for start, row in enumerate(rows))
            if len(read) != len(names) + 1:
                raise TableRefused(f"{len(read)} rows for {len(names)} cuts")
            return CutTable(model_digest=Digest(digest), tensors=names, rows=read)
    raise TableRefused(f"not a table of cuts of version {VERSION}")


def _numbers(each: Candidate) -> list[int | None]:
    work: tuple[int | None, ...] = (None,) * 3
    if each.work is not None:
        work = (each.work.convolution, each.work.matrix, each.work.memory)
    sizes = (each.weight_bytes, each.resident_bytes, each.least_bytes)
    return [*sizes, each.flops, *work, each.received_bytes, each.sent_bytes]


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise TableRefused(f"{value!r:.40} is not a tensor's name")
    return value


def _row(value: object, wanted: int) -> tuple[Candidate, ...]:
    if not isinstance(value, list) or len(value) != wanted:
        raise TableRefused(f"a row does not have {wanted} fragments")
    return tuple(_candidate(each) for each in value)


def _candidate(value: object) -> Candidate:
    if not isinstance(value, list) or len(value) != _NUMBERS:
        raise TableRefused(f"a fragment does not have {_NUMBERS} numbers")
    weight, resident, least, flops, *work, received, sent = map(_count, value)
    if weight is None or resident is None or least is None or least > resident:
        raise TableRefused("a fragment's sizes are not known, or the least is over the resident")
    convolution, matrix, memory = work
    known = None
    if convolution is not None and matrix is not None and memory is not None:
        known = Work(convolution=convolution, matrix=matrix, memory=memory)
    return Candidate(
        weight_bytes=weight,
        resident_bytes=resident,
        least_bytes=least,
        flops=flops,
        work=known,
        received_bytes=received,
        sent_bytes=sent,
    )


def _count(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise TableRefused(f"{value!r:.40} is not a count")
    return value
