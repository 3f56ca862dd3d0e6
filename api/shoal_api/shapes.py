"""What one field of a manifest may hold: reading it, and saying so in OpenAPI.

A `Shape[T]` reads a JSON value (`object`, as YAML or the API server give it) into a `T`, or notes
in `errors` what is wrong and where, and returns INVALID. `schema()` says the same as a structural
OpenAPI schema. Both come from the same few attributes, so they cannot drift apart.

Patterns keep to what Python's `re` and Go's RE2 understand alike: no look-around, and `[0-9]` in
the place of `\\d`.
"""

import difflib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import isfinite
from types import MappingProxyType
from typing import Final, Generic, Literal, TypeVar

from shoal_protocol.units import QUANTITY_LENGTH, QUANTITY_PATTERN, nearest_quantity, parse_quantity

Path = tuple[str | int, ...]
"""From a document's root to a field: names, and indices into lists."""

Schema = dict[str, object]
"""A structural OpenAPI v3 schema as JSON."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with a document, and where."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.message}" if self.path else self.message


class Invalid(Enum):
    """In the place of a value that could not be read; the errors say why."""

    INVALID = "Invalid"


INVALID: Final = Invalid.INVALID
INT64_MAX: Final = 2**63 - 1
Errors = list[FieldError]

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
N = TypeVar("N", bound=int)
T_co = TypeVar("T_co", covariant=True)


def path_text(path: Path) -> str:
    """`spec.local.devices[1].memory`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def show(value: object) -> str:
    """A JSON value in an error, short enough to stay readable."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean shape?)`, or nothing when no known word is near."""
    lowered = {word.lower(): word for word in known}
    near = difflib.get_close_matches(given.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[near[0]]}?)" if near else ""


class Shape(ABC, Generic[T_co]):
    """What a field may hold."""

    __slots__ = ()

    @abstractmethod
    def read(self, value: object, at: Path, errors: Errors) -> T_co | Invalid:
        """The value as Python sees it; INVALID after noting at least one error."""

    @abstractmethod
    def schema(self) -> Schema:
        """The same in OpenAPI."""

    @abstractmethod
    def words(self) -> str:
        """The same in a few words, for the reference."""


def _refuse(errors: Errors, at: Path, message: str) -> Literal[Invalid.INVALID]:
    errors.append(FieldError(at, message))
    return INVALID


def _wanted(value: object, wanted: str) -> str:
    if value is None:
        return f"is empty: give {wanted}"
    return f"{show(value)} is not {wanted}"


def _matches(text: str, pattern: str) -> str:
    """A pattern as a rule of CEL: a schema's own `pattern` says in its error only itself."""
    assert "'" not in pattern
    return f"{text}.matches(r'{pattern}')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Shape[str]):
    """A bounded string; `meant` says in an error and in the reference what its pattern means,
    `in_cluster` what an API server says instead.
    """

    max_length: int
    min_length: int = 1
    pattern: str | None = None
    meant: str = "text"
    in_cluster: str | None = None
    format: str | None = None

    def read(self, value: object, at: Path, errors: Errors) -> str | Invalid:
        if not isinstance(value, str):
            quotes = " (write it in quotes)" if isinstance(value, int | float) else ""
            return _refuse(errors, at, _wanted(value, self.meant) + quotes)
        if len(value) < self.min_length:
            return _refuse(errors, at, f"{show(value)} is empty: give {self.meant}")
        if len(value) > self.max_length:
            long = f"has {len(value)} characters; at most {self.max_length} are allowed"
            return _refuse(errors, at, f"{show(value)} {long}")
        if self.pattern is not None and re.fullmatch(self.pattern, value) is None:
            return _refuse(errors, at, f"{show(value)} is not {self.meant}")
        return value

    def schema(self) -> Schema:
        schema: Schema = {"type": "string", "maxLength": self.max_length}
        if self.min_length:
            schema["minLength"] = self.min_length
        if self.format is not None:
            # CEL sees what has a format as a value of its own, not as text.
            schema |= {"format": self.format, "pattern": self.pattern}
        elif self.pattern is not None:
            rule = {
                "rule": _matches("self", self.pattern),
                "message": f"must be {self.in_cluster or self.meant}",
            }
            schema["x-kubernetes-validations"] = [rule]
        return schema

    def words(self) -> str:
        return f"{self.meant}, at most {self.max_length} characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Shape[int]):
    """A whole number within bounds, both inclusive."""

    minimum: int
    maximum: int

    def read(self, value: object, at: Path, errors: Errors) -> int | Invalid:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON and YAML write 3 as 3.0, too
        if isinstance(value, bool) or not isinstance(value, int):
            return _refuse(errors, at, _wanted(value, "a whole number"))
        if not self.minimum <= value <= self.maximum:
            bounds = f"{self.minimum} to {self.maximum}"
            return _refuse(errors, at, f"{value} is outside of {bounds}")
        return value

    def schema(self) -> Schema:
        size = "int32" if self.minimum >= -(2**31) and self.maximum < 2**31 else "int64"
        schema: Schema = {"type": "integer", "format": size, "minimum": self.minimum}
        # The API server reads a bound as a float, in which this one is one too many.
        if self.maximum < INT64_MAX:
            schema["maximum"] = self.maximum
        return schema

    def words(self) -> str:
        if self.maximum == INT64_MAX:
            return f"whole number, {self.minimum} or more"
        return f"whole number, {self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Shape[float]):
    """A measured number that is not negative. For status only: a spec has whole numbers."""

    def read(self, value: object, at: Path, errors: Errors) -> float | Invalid:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return _refuse(errors, at, _wanted(value, "a number"))
        if value < 0:
            return _refuse(errors, at, f"{show(value)} is less than 0")
        return float(value)

    def schema(self) -> Schema:
        return {"type": "number", "format": "double", "minimum": 0}

    def words(self) -> str:
        return "number, 0 or more"


@dataclass(frozen=True, slots=True)
class Flag(Shape[bool]):
    """true or false."""

    def read(self, value: object, at: Path, errors: Errors) -> bool | Invalid:
        if isinstance(value, bool):
            return value
        return _refuse(errors, at, _wanted(value, "true or false"))

    def schema(self) -> Schema:
        return {"type": "boolean"}

    def words(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Choice(Shape[E]):
    """One of a closed set of CamelCase words."""

    of: type[E]

    def read(self, value: object, at: Path, errors: Errors) -> E | Invalid:
        words = [member.value for member in self.of]
        if isinstance(value, str) and value in words:
            return self.of(value)
        near = did_you_mean(value, words) if isinstance(value, str) else ""
        return _refuse(errors, at, f"{_wanted(value, 'one of ' + ', '.join(words))}{near}")

    def schema(self) -> Schema:
        return {"type": "string", "enum": [member.value for member in self.of]}

    def words(self) -> str:
        return "one of " + ", ".join(member.value for member in self.of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity(Shape[N]):
    """A Kubernetes quantity between two others, read as a whole number, rounded up.

    `of` is what that number is counted as; `per_unit` is how many of it one `unit` makes: 1 for
    bytes and bits per second, 1000 for processors, which are read as thousandths.
    """

    of: Callable[[int], N]
    minimum: str
    maximum: str
    unit: str
    such_as: str
    per_unit: int = 1

    def read(self, value: object, at: Path, errors: Errors) -> N | Invalid:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, float) and isfinite(value):
            return _refuse(errors, at, f'{value} is a fraction: write it in quotes, "{value}"')
        if isinstance(value, bool) or not isinstance(value, int | str):
            return _refuse(errors, at, _wanted(value, f"a quantity such as {self.such_as}"))
        text = str(value)
        if not re.fullmatch(QUANTITY_PATTERN, text) or len(text) > QUANTITY_LENGTH:
            near = self._nearest(text)
            wrong = f"{show(value)} is not a quantity such as {self.such_as}{near}"
            return _refuse(errors, at, wrong)
        amount = parse_quantity(text)
        if amount < parse_quantity(self.minimum):
            wrong = f"{text} is less than {self.minimum}{self._nearest(text)}"
            return _refuse(errors, at, wrong)
        if amount > parse_quantity(self.maximum):
            return _refuse(errors, at, f"{text} is more than {self.maximum}")
        whole = (amount * self.per_unit).to_integral_value(rounding="ROUND_CEILING")
        return self.of(int(whole))

    def _nearest(self, text: str) -> str:
        """`64Mb`, `64 mib` and `64m` (thousandths of a byte) probably mean 64Mi."""
        if self.per_unit != 1:
            return ""
        return nearest_quantity(text, binary=self.such_as.endswith("i"))

    def schema(self) -> Schema:
        is_one = _matches("string(self)", QUANTITY_PATTERN)
        quantity = "quantity(string(self))"
        least = f"{quantity}.compareTo(quantity('{self.minimum}')) >= 0"
        most = f"{quantity}.compareTo(quantity('{self.maximum}')) <= 0"
        message = f"must be a quantity such as {self.such_as}, {self.minimum} to {self.maximum}"
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": QUANTITY_LENGTH,
            "minimum": 0,
            "x-kubernetes-validations": [
                {"rule": f"{is_one} && {least} && {most}", "message": message}
            ],
        }

    def words(self) -> str:
        return f"quantity of {self.unit}, {self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Items(Shape[tuple[T, ...]]):
    """A bounded list; `key` names the field that identifies its items, and may not repeat."""

    of: Shape[T]
    max_items: int
    min_items: int = 0
    key: str | None = None

    def read(self, value: object, at: Path, errors: Errors) -> tuple[T, ...] | Invalid:
        if not isinstance(value, list):
            return _refuse(errors, at, _wanted(value, "a list"))
        if not self.min_items <= len(value) <= self.max_items:
            bounds = f"{self.min_items} to {self.max_items}"
            return _refuse(errors, at, f"has {len(value)} items; {bounds} are allowed")
        before = len(errors)
        items = [self.of.read(item, (*at, place), errors) for place, item in enumerate(value)]
        self._find_repeats(value, at, errors)
        if len(errors) > before:
            return INVALID
        return tuple(item for item in items if not isinstance(item, Invalid))

    def _find_repeats(self, value: list[object], at: Path, errors: Errors) -> None:
        if self.key is None:
            return
        seen: dict[object, int] = {}
        for place, item in enumerate(value):
            name = item.get(self.key) if isinstance(item, dict) else None
            if not isinstance(name, str | int | float):
                continue
            if name in seen:
                message = f"{show(name)} is the {self.key} of item [{seen[name]}] already"
                errors.append(FieldError((*at, place, self.key), message))
            seen.setdefault(name, place)

    def schema(self) -> Schema:
        schema: Schema = {"type": "array", "items": self.of.schema(), "maxItems": self.max_items}
        if self.min_items:
            schema["minItems"] = self.min_items
        if self.key is not None:
            schema["x-kubernetes-list-type"] = "map"
            schema["x-kubernetes-list-map-keys"] = [self.key]
        else:
            schema["x-kubernetes-list-type"] = "atomic"
        return schema

    def words(self) -> str:
        unique = f", each with another {self.key}" if self.key else ""
        return f"list of at most {self.max_items}{unique}: {self.of.words()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Shape[Mapping[str, str]]):
    """Names with values, as in labels. `names`: what a name may be; None: any. `max_items` None: as
    many as Kubernetes takes.
    """

    values: Text
    max_items: int | None
    names: Text | None = None

    def read(self, value: object, at: Path, errors: Errors) -> Mapping[str, str] | Invalid:
        if not isinstance(value, dict):
            return _refuse(errors, at, _wanted(value, "a mapping of names to values"))
        value = {name: entry for name, entry in value.items() if entry is not None}
        if self.max_items is not None and len(value) > self.max_items:
            many = f"has {len(value)} entries; at most {self.max_items} are allowed"
            return _refuse(errors, at, many)
        before, table = len(errors), {}
        for name, entry in value.items():
            if self.names is not None:
                self.names.read(str(name), at, errors)
            table[str(name)] = self.values.read(entry, (*at, str(name)), errors)
        if len(errors) > before:
            return INVALID
        return MappingProxyType({k: v for k, v in table.items() if not isinstance(v, Invalid)})

    def schema(self) -> Schema:
        schema: Schema = {"type": "object", "additionalProperties": self.values.schema()}
        if self.max_items is not None:
            schema["maxProperties"] = self.max_items
        if self.names is not None and self.names.pattern is not None:
            one = f"size(name) <= {self.names.max_length} && "
            rule = f"self.all(name, {one}{_matches('name', self.names.pattern)})"
            message = f"each name must be {self.names.meant}"
            schema["x-kubernetes-validations"] = [{"rule": rule, "message": message}]
        return schema

    def words(self) -> str:
        many = "" if self.max_items is None else f"at most {self.max_items} "
        names = "" if self.names is None else f", each {self.names.meant}"
        return f"mapping of {many}names to text{names}"


@dataclass(frozen=True, slots=True)
class Json(Shape[Mapping[str, object]]):
    """An object that is passed on as it is: a part of Kubernetes' own kinds."""

    def read(self, value: object, at: Path, errors: Errors) -> Mapping[str, object] | Invalid:
        if not isinstance(value, dict):
            return _refuse(errors, at, _wanted(value, "a mapping"))
        return MappingProxyType({str(name): each for name, each in value.items()})

    def schema(self) -> Schema:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

    def words(self) -> str:
        return "object of Kubernetes"
