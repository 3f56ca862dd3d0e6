"""What an API server does with a CRD's schema, as far as Shoal's kinds use it.

`jsonschema` validates; added to it are Kubernetes' own words (list-maps, CEL rules run by a real
CEL interpreter), strict field validation, and Go's reading of patterns: `$` is the very end.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators

UNITS: dict[str, int | Decimal] = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
    "Ei": 2**60,
}
UNITS |= {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": 10**3}
UNITS |= {"M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}


def amount(text: str) -> Decimal:
    """A quantity as apimachinery's resource.Quantity reads it."""
    for suffix, factor in UNITS.items():
        if text.endswith(suffix):
            return Decimal(text.removesuffix(suffix)) * factor
    return Decimal(text)


def compare(one: str, other: str) -> int:
    difference = amount(one) - amount(other)
    return (difference > 0) - (difference < 0)


def cel_holds(rule: str, value: object, **more: object) -> bool:
    import cel  # noqa: PLC0415 # its command line is imported with it, half a second

    context = cel.Context()
    for name, each in {"self": value, **more}.items():
        context.add_variable(name, each)
    context.add_function("quantity", str)
    context.add_function("compareTo", compare)
    return cel.evaluate(rule, context) is True


Errors = Iterator[ValidationError]


def _rules(_: Any, rules: list[dict[str, str]], instance: object, schema: object) -> Errors:
    for rule in rules:
        if "oldSelf" in rule["rule"]:
            continue  # asked on updates only
        try:
            holds = cel_holds(rule["rule"], instance)
        except (ArithmeticError, ValueError, RuntimeError, TypeError):
            holds = False
        if not holds:
            yield ValidationError(rule["message"])


def _map_keys(_: Any, keys: list[str], instance: object, schema: object) -> Errors:
    if isinstance(instance, list) and all(isinstance(item, dict) for item in instance):
        seen = [tuple(_key(item.get(key)) for key in keys) for item in instance]
        if len(set(seen)) < len(seen):
            yield ValidationError("two items have the same key")


def _key(value: object) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _pattern(_: Any, pattern: str, instance: object, schema: object) -> Errors:
    if isinstance(instance, str) and re.search(pattern.removesuffix("$") + r"\Z", instance) is None:
        yield ValidationError(f"{instance!r} does not match {pattern}")


def _properties(validator: Any, names: dict[str, Any], instance: object, schema: object) -> Errors:
    if not isinstance(instance, dict):
        return
    for name in instance.keys() - names.keys():
        yield ValidationError(f"unknown field {name!r}")
    for name in instance.keys() & names.keys():
        yield from validator.descend(instance[name], names[name], path=name, schema_path=name)


def _is_integer(_: object, instance: Any) -> bool:
    """What is larger than 64 bits is read as a float; a float that is whole is an integer."""
    is_whole = isinstance(instance, int) or (isinstance(instance, float) and instance.is_integer())
    return is_whole and not isinstance(instance, bool) and -(2**63) <= instance < 2**63


_Validator = validators.extend(  # type: ignore[no-untyped-call] # its stubs leave it out
    Draft202012Validator,
    {
        "x-kubernetes-validations": _rules,
        "x-kubernetes-list-map-keys": _map_keys,
        "pattern": _pattern,
        "properties": _properties,
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def problems(schema: dict[str, Any], document: object) -> list[str]:
    """Why an API server with strict validation would refuse the document."""
    return [error.message for error in _Validator(schema).iter_errors(pruned(schema, document))]


def pruned(schema: Any, value: object) -> object:
    """Without the fields that are null, which an API server takes as if they were not there, and
    with the defaults of those that are not there."""
    match value:
        case dict():
            names, others = schema.get("properties", {}), schema.get("additionalProperties", {})
            defaults = {name: each["default"] for name, each in names.items() if "default" in each}
            given = {
                name: each
                for name, each in value.items()
                if each is not None or (name not in names and not others)
            }
            return {
                name: pruned(names.get(name, others), each)
                for name, each in (defaults | given).items()
            }
        case list():
            return [pruned(schema.get("items", {}), each) for each in value]
        case _:
            return value


def every_schema(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in a structural schema, with where they stand."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from every_schema(inner, f"{path}.{name}")
    if "items" in schema:
        yield from every_schema(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from every_schema(schema["additionalProperties"], f"{path}{{}}")
