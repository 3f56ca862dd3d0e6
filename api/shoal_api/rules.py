"""What must hold between the fields of one record, said once for the parser and for the API server.

A rule is data: it can be asked of a document, and written as CEL. Rules about change are asked by
the API server only, because only it sees what was before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Rule(Protocol):
    """What must hold between the fields of one record."""

    @property
    def cel(self) -> str:
        """The rule for the API server; `self` is the record."""

    @property
    def message(self) -> str:
        """What to do about it, for both."""

    @property
    def field(self) -> str | None:
        """The one field that the rule is about; None: it is about the record."""

    def holds(self, document: Mapping[str, object]) -> bool:
        """Asked of the document itself, before defaults."""


@dataclass(frozen=True, slots=True)
class ExactlyOne:
    names: tuple[str, ...]
    field: None = None

    @property
    def cel(self) -> str:
        return f"{_how_many(self.names)} == 1"

    @property
    def message(self) -> str:
        return f"exactly one of {', '.join(self.names)} must be given"

    def holds(self, document: Mapping[str, object]) -> bool:
        return sum(name in document for name in self.names) == 1


@dataclass(frozen=True, slots=True)
class AtMostOne:
    names: tuple[str, ...]
    field: None = None

    @property
    def cel(self) -> str:
        return f"{_how_many(self.names)} <= 1"

    @property
    def message(self) -> str:
        return f"at most one of {', '.join(self.names)} may be given"

    def holds(self, document: Mapping[str, object]) -> bool:
        return sum(name in document for name in self.names) <= 1


@dataclass(frozen=True, slots=True)
class Immutable:
    """Once given, a field stays as it is. Only the API server sees the value before.

    `from_the_start`: nor can it be given later.
    """

    field: str
    from_the_start: bool = False

    @property
    def cel(self) -> str:
        name = self.field
        if self.from_the_start:
            same = f"self.{name} == oldSelf.{name}"
            return f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {same})"
        return f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} == oldSelf.{name})"

    @property
    def message(self) -> str:
        when = "" if self.from_the_start else " once it is set"
        return f"{self.field} cannot be changed{when}; make a new object"

    def holds(self, document: Mapping[str, object]) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Ended:
    """What a job has ended as stays, as in `batch/v1`: after the end nobody else knows it, so the
    operator could not restore what somebody has edited. `fields` are those of the status. Only the
    API server sees the status before.
    """

    fields: tuple[str, ...]
    field: str = "status"

    @property
    def cel(self) -> str:
        ends = "c.type in ['Complete', 'Failed'] && c.status == 'True'"
        before = f"oldSelf.status.conditions.exists(c, {ends})"
        same = (
            f"has(self.status.{name}) == has(oldSelf.status.{name}) && "
            f"(!has(self.status.{name}) || self.status.{name} == oldSelf.status.{name})"
            for name in self.fields
        )
        known = "has(oldSelf.status) && has(oldSelf.status.conditions)"
        return f"!({known} && {before}) || (has(self.status) && {' && '.join(same)})"

    @property
    def message(self) -> str:
        return "the job has ended: what its status says of that stays; make a new object"

    def holds(self, document: Mapping[str, object]) -> bool:
        return True


def exactly_one(*names: str) -> ExactlyOne:
    return ExactlyOne(names)


def at_most_one(*names: str) -> AtMostOne:
    return AtMostOne(names)


def _how_many(names: tuple[str, ...]) -> str:
    given = ", ".join(f"has(self.{name})" for name in names)
    return f"[{given}].filter(given, given).size()"
