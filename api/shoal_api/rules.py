"""What must hold between the fields of one record, said once for the parser and for the API server.

Rules about change are asked by the API server only, because only it sees what was before.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """`cel` is the rule for the API server, in which `self` is the record; `message` says what to
    do about it, for both. `field` is the one field that it is about; None: it is about the record.

    Of the fields in `exclusive` at most one may be given, and where `required` exactly one.
    `immutable`: the field cannot be changed. `check` says of the record, read and with its
    defaults, what `cel` says of the document; None: there is nothing more to it.
    """

    cel: str
    message: str
    field: str | None = None
    exclusive: tuple[str, ...] = ()
    required: bool = False
    immutable: bool = False
    check: Callable[[Any], bool] | None = None

    def holds(self, document: Collection[object]) -> bool:
        """Whether the document itself follows the rule, before defaults."""
        given = sum(name in document for name in self.exclusive)
        return given == 1 or (given == 0 and not self.required)

    def allows(self, record: object) -> bool:
        """Whether the record that was read, with its defaults, follows the rule."""
        return self.check is None or self.check(record)


def exactly_one(*names: str) -> Rule:
    message = f"exactly one of {', '.join(names)} must be given"
    return Rule(f"{_how_many(names)} == 1", message, exclusive=names, required=True)


def at_most_one(*names: str) -> Rule:
    message = f"at most one of {', '.join(names)} may be given"
    return Rule(f"{_how_many(names)} <= 1", message, exclusive=names)


def immutable(name: str) -> Rule:
    """Once given, a field stays as it is."""
    cel = f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} == oldSelf.{name})"
    message = f"{name} cannot be changed once it is set; make a new object"
    return Rule(cel, message, name, immutable=True)


def stays_true(name: str) -> Rule:
    """A flag that is not taken back."""
    cel = f"!has(oldSelf.{name}) || !oldSelf.{name} || (has(self.{name}) && self.{name})"
    return Rule(cel, f"{name} cannot be taken back; make a new object", name)


def immutable_from_the_start(name: str) -> Rule:
    """A field stays as it is; nor can it be given later."""
    message = f"{name} cannot be changed; make a new object"
    return Rule(_same(name, "self", "oldSelf"), message, name, immutable=True)


def ended(*names: str) -> Rule:
    """What a job has ended as stays, as in `batch/v1`: after the end nobody else knows it, so the
    operator could not restore what somebody has edited. `names` are fields of the status. A job
    that failed may be retried: then it has not ended any more.
    """
    ends = "c.type in ['Complete', 'Failed'] && c.status == 'True'"
    before = f"oldSelf.status.conditions.exists(c, {ends})"
    same = " && ".join(_same(name, "self.status", "oldSelf.status") for name in names)
    known = "has(oldSelf.status) && has(oldSelf.status.conditions)"
    message = "the job has ended: what its status says of that stays; make a new object"
    fails = "c.type == 'Failed' && c.status == 'True'"
    done = "(has(oldSelf.status.retry) ? oldSelf.status.retry.number : 0)"
    again = (
        f"oldSelf.status.conditions.exists(c, {fails}) && "
        f"has(self.spec.retry) && self.spec.retry.number > {done}"
    )
    cel = f"!({known} && {before}) || ({again}) || (has(self.status) && {same})"
    return Rule(cel, message, "status")


def _same(name: str, new: str, old: str) -> str:
    given = f"has({new}.{name}) == has({old}.{name})"
    return f"{given} && (!has({new}.{name}) || {new}.{name} == {old}.{name})"


def _how_many(names: tuple[str, ...]) -> str:
    given = ", ".join(f"has(self.{name})" for name in names)
    return f"[{given}].filter(given, given).size()"
