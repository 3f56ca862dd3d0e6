"""The reference of the kinds, docs/api.md and a page for each, made from the declarations."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from shoal_api.kinds import KINDS, KindNames
from shoal_api.schema import (
    API_VERSION,
    Object,
    description,
    members,
    record_in,
    rule_sentences,
    rules,
    shown_default,
)
from shoal_api.shapes import Items, Shape

_NOTE: Final = "<!-- Written by `make generate` from api/shoal_api/kinds; do not edit by hand. -->"
_INTRODUCTION: Final = f"""\
{_NOTE}

# The kinds

What a manifest may say, kind by kind: `apiVersion: {API_VERSION}`. The same files go to `shoal run`
and to `kubectl apply`.

- References are objects, `modelRef: {{name: ...}}`, to objects of the same namespace.
- Sizes are Kubernetes quantities (`64Mi`, `1G`); fractions are written in quotes (`"0.5"`). In a
  status they are bytes as whole numbers.
- Times are whole seconds, with the unit in the field's name.
- A field without a default is either required or may be left out; an unknown field is an error.
- An address is `pvc://CLAIM/PATH`, `file:///PATH`, `https://...`, `s3://BUCKET/KEY`, `oci://...`,
  or a path relative to the manifest. In local mode `pvc://CLAIM/PATH` lies in the folder given with
  `--volume CLAIM=DIR`, by default `CLAIM/` beside the manifest.
"""

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9 _./:-]*")


def pages() -> dict[str, str]:
    """Each page by its path below docs/: the introduction, and a page for each kind."""
    found = {"api.md": _introduction()}
    found |= {f"kinds/{names.singular}.md": _kind(names) for names in KINDS.values()}
    return found


def example_document(names: KindNames) -> dict[str, object]:
    """A manifest made of the fields' own examples."""
    head = {"apiVersion": API_VERSION, "kind": names.cls.__name__}
    metadata = {"name": f"my-{names.singular}"}
    spec = members(names.cls)["spec"].shape
    return {**head, "metadata": metadata, "spec": _example(spec)}


def _introduction() -> str:
    rows = ["| kind | what it is | `kubectl get` |", "|---|---|---|"]
    for names in KINDS.values():
        link = f"[{names.cls.__name__}](kinds/{names.singular}.md)"
        rows.append(f"| {link} | {_first_paragraph(names.cls)} | `{names.short}` |")
    return "\n".join([_INTRODUCTION, *rows, ""])


def _kind(names: KindNames) -> str:
    cls = names.cls
    spec, status = members(cls)["spec"].shape, members(cls)["status"].shape
    lines = [_NOTE, "", f"# {cls.__name__}", "", _first_paragraph(cls), ""]
    lines += [f"`kubectl get {names.plural}`, or `{names.short}` for short.", ""]
    if names.written:
        lines += ["```yaml", *_yaml(example_document(names)), "```", ""]
    lines += _records(spec, "spec")
    lines += _records(status, "status")
    return "\n".join(lines)


def _records(shape: Shape[object], path: str) -> list[str]:
    """A table for the record, then those of the records in it."""
    cls = record_in(shape)
    if cls is None:
        return []
    lines = [f"## {path}", "", _first_paragraph(cls), ""]
    lines += [f"- {text}" for text in rule_sentences(cls)]
    lines += [""] * bool(rules(cls))
    lines += ["| field | holds | default | meaning |", "|---|---|---|---|"]
    deeper: list[str] = []
    for name, declared in members(cls).items():
        default = "required" if declared.required else ""
        if shown_default(declared):
            default = f"`{_flow(declared.default)}`"
        cells = (f"`{name}`", declared.shape.words(), default, description(declared))
        lines.append(f"| {' | '.join(cells)} |")
        if (inner := record_in(declared.shape)) is not None and name != "conditions":
            is_reference = tuple(members(inner)) == ("name",) and name.endswith("Ref")
            brackets = "[]" * isinstance(declared.shape, Items)
            deeper += [] if is_reference else _records(declared.shape, f"{path}.{name}{brackets}")
    return [*lines, "", *deeper]


def _first_paragraph(cls: type) -> str:
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


def _example(shape: Shape[object]) -> object:
    """A value made of the examples of its fields, following the rules between them."""
    match shape:
        case Items():
            return [_example(shape.of)]
        case Object():
            return _example_record(shape.of)
        case _:
            raise AssertionError(f"{shape} needs an example of its own")


def _example_record(cls: type) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for name, declared in members(cls).items():
        excluded_by = (rule.exclusive for rule in rules(cls) if name in rule.exclusive)
        if any(chosen.keys() & others for others in excluded_by):
            continue
        if shown_default(declared) and declared.default != {}:
            chosen[name] = declared.default
        elif declared.example is not None:
            chosen[name] = declared.example
        elif declared.required or shown_default(declared):
            inner = record_in(declared.shape)
            chosen[name] = declared.default if inner is None else _example(declared.shape)
    return {name: value for name, value in chosen.items() if value != {}}


def _yaml(value: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """A document in block style, short mappings in flow style."""
    for name, inner in value.items():
        if isinstance(inner, dict) and any(isinstance(v, dict | list) for v in inner.values()):
            yield f"{indent}{name}:"
            yield from _yaml(inner, indent + "  ")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield f"{indent}{name}:"
            yield from (f"{indent}- {_flow(item)}" for item in inner)
        else:
            yield f"{indent}{name}: {_flow(inner)}"


def _flow(value: object) -> str:
    match value:
        case dict():
            inside = ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items())
            return "{" + inside + "}"
        case list():
            return "[" + ", ".join(map(_flow, value)) + "]"
        case str() if _PLAIN.fullmatch(value) or re.fullmatch(r"[0-9]+[A-Za-z]+", value):
            return value
        case _:
            return json.dumps(value)
