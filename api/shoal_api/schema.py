"""Kinds as declarations: one `member(...)` per field is the source of all that is said about it.

A record is a frozen dataclass whose fields are members; from them come

* the Python value (`parse`), with defaults filled in,
* the errors, all of them at once, each with the path of its field,
* the structural OpenAPI schema of the CRD (`openapi_schema`), with meaning, bounds and defaults.

A field `latency_milliseconds` is written `latencyMilliseconds`. An unknown field is an error here,
as it is for `kubectl` with strict validation. A field that may be absent is so where it is null, as
for an API server. Rules across fields are data too: each can be asked
of a document, and written as CEL.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Final, Generic, TypeVar, dataclass_transform, overload

from shoal_api.rules import Rule
from shoal_api.shapes import (
    INVALID,
    Errors,
    FieldError,
    Invalid,
    Items,
    Path,
    Schema,
    Shape,
    Table,
    Text,
    did_you_mean,
    show,
)

GROUP: Final = "shoal.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Generic[T]):
    """A field's declaration. `default` is as a manifest would write it; MISSING: required.
    `attribute` is the field's name in Python.
    """

    shape: Shape[T]
    meaning: str
    unit: str
    default: object
    example: object
    attribute: str = ""

    @property
    def required(self) -> bool:
        return self.default is MISSING


_KEY: Final = "shoal.member"


@overload
def member(shape: Shape[T], meaning: str, *, unit: str = "", example: object = None) -> T: ...


@overload
def member(
    shape: Shape[T], meaning: str, *, default: None, unit: str = "", example: object = None
) -> T | None: ...


@overload
def member(
    shape: Shape[T], meaning: str, *, default: object, unit: str = "", example: object = None
) -> T: ...


def member(
    shape: Shape[T],
    meaning: str,
    *,
    default: object = MISSING,
    unit: str = "",
    example: object = None,
) -> T | None:
    """Declare a field of a record; without `default` it is required, with None it may be absent."""
    declared = Member(shape=shape, meaning=meaning, unit=unit, default=default, example=example)
    metadata = {_KEY: declared}
    if default is MISSING:
        return field(metadata=metadata)  # type: ignore[no-any-return]  # what `field` is for
    value = None if default is None else _value_of_default(shape, default)
    return field(metadata=metadata, default_factory=lambda: value)


def _value_of_default(shape: Shape[T], default: object) -> T:
    errors: Errors = []
    value = shape.read(default, (), errors)
    assert not isinstance(value, Invalid), f"the default {default!r} is refused: {errors}"
    return value


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(member,))
def record(*rules: Rule, ignored: tuple[str, ...] = ()) -> Callable[[type[R]], type[R]]:
    """Make a class of members a frozen value that can be parsed. `ignored`: what a document may
    have besides.
    """

    def declare(cls: type[R]) -> type[R]:
        made: type[R] = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        _RULES[made], _IGNORED[made] = rules, ignored
        _MEMBERS[made] = {
            json_name(each.name): replace(each.metadata[_KEY], attribute=each.name)
            for each in fields(made)  # type: ignore[arg-type]  # made by `dataclass` just above
        }
        return made

    return declare


_RULES: dict[type, tuple[Rule, ...]] = {}
_IGNORED: dict[type, tuple[str, ...]] = {}
_MEMBERS: dict[type, dict[str, Member[object]]] = {}


def members(cls: type) -> Mapping[str, Member[object]]:
    """A record's fields by the names that a manifest writes."""
    return _MEMBERS[cls]


def rules(cls: type) -> tuple[Rule, ...]:
    """What must hold between a record's fields."""
    return _RULES[cls]


def json_name(name: str) -> str:
    """`model_ref` is written `modelRef`."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


@dataclass(frozen=True, slots=True)
class Object(Shape[R]):
    """A field that is a record itself."""

    of: type[R]

    def read(self, value: object, at: Path, errors: Errors) -> R | Invalid:
        if not isinstance(value, dict):
            known = ", ".join(_MEMBERS[self.of])
            given = "is empty" if value is None else f"{show(value)} is not a mapping"
            is_name = isinstance(value, str) and tuple(_MEMBERS[self.of]) == ("name",)
            advice = f"write {{name: {value}}}" if is_name else f"its fields are {known}"
            errors.append(FieldError(at, f"{given}; {advice}"))
            return INVALID
        before = len(errors)
        _find_unknown(self.of, value, at, errors)
        written = {name for name, each in value.items() if each is not None}
        arguments: dict[str, object] = {}
        for name, declared in _MEMBERS[self.of].items():
            if name in written or (declared.required and name in value):
                arguments[declared.attribute] = declared.shape.read(
                    value[name], (*at, name), errors
                )
            elif declared.required:
                errors.append(FieldError((*at, name), f"is missing{_for_example(declared)}"))
        errors.extend(
            FieldError(at, rule.message) for rule in _RULES[self.of] if not rule.holds(written)
        )
        return self._made(arguments, at, errors) if len(errors) == before else INVALID

    def _made(self, arguments: Mapping[str, object], at: Path, errors: Errors) -> R | Invalid:
        """The record, unless what its fields say together is against a rule."""
        made = self.of(**arguments)
        broken = [rule for rule in _RULES[self.of] if not rule.allows(made)]
        errors.extend(
            FieldError(at if rule.field is None else (*at, rule.field), rule.message)
            for rule in broken
        )
        return INVALID if broken else made

    def schema(self) -> Schema:
        return record_schema(self.of)

    def words(self) -> str:
        return "object"


def _find_unknown(cls: type, value: dict[object, object], at: Path, errors: Errors) -> None:
    known = (*_MEMBERS[cls], *_IGNORED[cls])
    for name in value:
        if name in known:
            continue
        near = did_you_mean(str(name), known) or f"; known are {', '.join(known)}"
        errors.append(FieldError((*at, str(name)), f"there is no such field{near}"))


def _for_example(declared: Member[object]) -> str:
    return "" if declared.example is None else f"; for example {show(declared.example)}"


def record_schema(cls: type) -> Schema:
    """A record as a structural schema, with its members' meaning, bounds and defaults."""
    properties: dict[str, object] = {}
    for name, declared in members(cls).items():
        schema = declared.shape.schema()
        schema["description"] = explanation(declared)
        if shown_default(declared):
            schema["default"] = declared.default
        if declared.example is not None:
            schema["example"] = declared.example
        properties[name] = schema
    schema = {"type": "object", "properties": properties}
    required = [name for name, declared in members(cls).items() if declared.required]
    if required:
        schema["required"] = required
    if rules(cls):
        schema["x-kubernetes-validations"] = [_rule_schema(rule) for rule in rules(cls)]
    return schema


def _rule_schema(rule: Rule) -> Schema:
    where = {} if rule.field is None else {"fieldPath": f".{rule.field}"}
    return {"rule": rule.cel, "message": rule.message, **where}


def description(declared: Member[object]) -> str:
    """A field's meaning with its unit."""
    return f"{declared.meaning} Unit: {declared.unit}." if declared.unit else declared.meaning


def explanation(declared: Member[object]) -> str:
    """All that there is to say of a field, as `kubectl explain` shows it."""
    sentences = [description(declared)]
    inner = record_in(declared.shape)
    if not isinstance(declared.shape, Object):
        sentences.append(f"Value: {declared.shape.words()}.")
    if inner is not None:
        sentences += rule_sentences(inner)
    if shown_default(declared) and declared.default != {}:
        sentences.append(f"Default: {_plain(declared.default)}.")
    if declared.example is not None:
        sentences.append(f"Example: {_plain(declared.example)}")
    return " ".join(sentences)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def rule_sentences(cls: type) -> list[str]:
    """A record's rules for people; what can never be changed is one sentence."""
    fixed = [rule.field for rule in rules(cls) if rule.field and rule.immutable]
    messages = [rule.message for rule in rules(cls) if not rule.immutable]
    sentences = [f"{text[0].upper()}{text[1:]}." for text in messages]
    if fixed:
        sentences.append(f"Fixed once given; make a new object to change it: {', '.join(fixed)}.")
    return sentences


def record_in(shape: Shape[object]) -> type | None:
    """The record that a field is, or that its items are."""
    match shape:
        case Object():
            return shape.of
        case Items():
            return record_in(shape.of)
        case _:
            return None


def shown_default(declared: Member[object]) -> bool:
    """Whether a default says anything: an absent field, and an empty list or table, do not."""
    if declared.required or declared.default is None:
        return False
    return not (isinstance(declared.shape, Items | Table) and not declared.default)


def parse(cls: type[R], document: Mapping[str, object]) -> R | tuple[FieldError, ...]:
    """Read a document as an object of a kind; on failure all of its errors."""
    errors: Errors = []
    for name, expected in (("apiVersion", API_VERSION), ("kind", cls.__name__)):
        given = document.get(name)
        if given != expected:
            errors.append(FieldError((name,), f"{show(given)} is not {expected}"))
    rest = {name: value for name, value in document.items() if name not in ("apiVersion", "kind")}
    value = Object(cls).read(rest, (), errors)
    return tuple(errors) if isinstance(value, Invalid) or errors else value


def openapi_schema(cls: type) -> Schema:
    """A kind's structural schema, as a CRD's `openAPIV3Schema` carries it.

    Of `metadata` a CRD may bound the name only; the rest is Kubernetes' own.
    """
    schema = record_schema(cls)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    shape = members(cls)["metadata"].shape
    assert isinstance(shape, Object)
    name = members(shape.of)["name"].shape
    assert isinstance(name, Text)
    bounds = {"type": "string", "maxLength": name.max_length, "pattern": name.pattern}
    metadata = {"type": "object", "properties": {"name": bounds}}
    validations = "x-kubernetes-validations"
    return {
        "type": "object",
        "description": (cls.__doc__ or "").strip().split("\n\n")[0],
        "required": ["spec"] if "spec" in properties else [],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            **properties,
            "metadata": metadata,
        },
        **({validations: schema[validations]} if validations in schema else {}),
    }
