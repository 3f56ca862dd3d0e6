"""YAML as untrusted JSON with line numbers.

Manifests are untrusted, so a document is composed (never constructed), bounded in bytes,
values and depth, and refused where YAML says more than JSON can: tags, merge keys, repeated keys.
An alias counts as often as it is used, which is what bounds "billion laughs". The parser's events
are counted before any node is made of them, so that a file of too many is refused at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import yaml

from shoal_api.shapes import Path, show

MAX_BYTES: Final = 1 << 20
MAX_VALUES: Final = 50_000
"""Values in a file, with aliases written out; those of all its documents together."""
MAX_DEPTH: Final = 64
MAX_DOCUMENTS: Final = 1_000
_MAX_DIGITS: Final = 64

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBERS: Final = yaml.constructor.SafeConstructor()
_TAG: Final = "tag:yaml.org,2002:"
_TRUE: Final = frozenset({"yes", "true", "on"})


class YamlRefused(Exception):
    """A stream that is not a list of plain documents: `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """One document: a JSON value, and the line of each of its fields."""

    value: object
    lines: Mapping[Path, int]

    def line_of(self, path: Path) -> int:
        """The line of a field, or of the nearest one around it when it is not there."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def parts(self, name: str, values: Sequence[object]) -> "Iterator[YamlDocument]":
        """The values of a list as documents of their own; their fields keep their lines."""
        lines: list[dict[Path, int]] = [{(): self.line_of((name,))} for _ in values]
        for path, line in self.lines.items():
            match path:
                case (str(each), int(index), *rest) if each == name:
                    lines[index][tuple(rest)] = line
        for value, of in zip(values, lines, strict=True):
            yield YamlDocument(value=value, lines=of)


def read_documents(content: bytes) -> tuple[YamlDocument, ...]:
    """All documents of a stream that are not empty; `YamlRefused` for the first trouble."""
    if len(content) > MAX_BYTES:
        raise YamlRefused(1, f"has {len(content)} bytes; at most {MAX_BYTES} are read")
    documents: list[YamlDocument] = []
    values = 0
    for node in _compose(content):
        if len(documents) == MAX_DOCUMENTS:
            line = node.start_mark.line + 1
            raise YamlRefused(line, f"more than {MAX_DOCUMENTS} documents in one file")
        reading = _Reading(values=values)
        value = reading.value(node, ())
        values = reading.values
        if value is not None:
            documents.append(YamlDocument(value=value, lines=reading.lines))
    return tuple(documents)


def _compose(content: bytes) -> Iterator[yaml.Node]:
    try:
        _count(content)
        yield from yaml.compose_all(content, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem)
        if mark and "cannot start any token" in problem:  # libyaml does not say which
            lines = content.decode(errors="replace").split("\n")[mark.line : mark.line + 1]
            character = "".join(lines)[mark.column : mark.column + 1]
            problem = f"found character {character!r} that cannot start any token"
        raise YamlRefused(mark.line + 1 if mark else 1, f"is not YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        line = content.count(b"\n", 0, error.position) + 1
        raise YamlRefused(line, f"is not YAML: {error.reason}") from error
    except RecursionError as error:
        raise YamlRefused(1, "is nested too deeply") from error


def _count(content: bytes) -> None:
    """Refuse what has more names and values, or nests deeper, than any accepted file can."""
    depth = events = 0
    for event in yaml.parse(content, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        events += isinstance(event, yaml.NodeEvent)
        if events > 2 * MAX_VALUES:
            raise YamlRefused(line, f"more than {MAX_VALUES} values in one file")
        if depth > MAX_DEPTH + 1:
            raise YamlRefused(line, f"is nested more than {MAX_DEPTH} deep")


@dataclass(slots=True)
class _Reading:
    """The walk over one document's nodes; `values` counts on from the documents before."""

    lines: dict[Path, int] = field(default_factory=dict)
    values: int = 0

    def value(self, node: yaml.Node, at: Path) -> object:
        line = node.start_mark.line + 1
        self.lines.setdefault(at, line)
        self.values += 1
        if self.values > MAX_VALUES:
            raise YamlRefused(line, f"more than {MAX_VALUES} values, with aliases written out")
        if len(at) > MAX_DEPTH:
            raise YamlRefused(line, f"is nested more than {MAX_DEPTH} deep")
        match node:
            case yaml.MappingNode(tag=tag) if tag == f"{_TAG}map":
                return self._mapping(node, at)
            case yaml.SequenceNode(tag=tag) if tag == f"{_TAG}seq":
                return [self.value(item, (*at, place)) for place, item in enumerate(node.value)]
            case yaml.ScalarNode():
                return _scalar(node)
        raise YamlRefused(line, f"the tag {node.tag} is not allowed")

    def _mapping(self, node: yaml.MappingNode, at: Path) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                raise YamlRefused(line, "merge keys (<<) are not read; write the fields out")
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlRefused(line, "a field's name must be text")
            # As Kubernetes reads it: a name is text, even where it looks like a number.
            name = str(key_node.value)
            path = (*at, name)
            if name in mapping:
                first = self.lines[path]
                raise YamlRefused(line, f"{show(name)} is given twice here; first on line {first}")
            self.lines.setdefault(path, line)
            mapping[name] = self.value(value_node, path)
        return mapping


def _scalar(node: yaml.ScalarNode) -> object:
    text = str(node.value)
    line = node.start_mark.line + 1
    match node.tag.removeprefix(_TAG):
        case "str" | "timestamp":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() in _TRUE
        # YAML 1.1 reads 12:30 as 750; nobody who writes that means it.
        case "int" | "float" if ":" in text:
            return text
        case "int" if len(text.replace("_", "").lstrip("+-")) > _MAX_DIGITS:
            raise YamlRefused(line, f"{show(text)} has too many digits")
        case "int":
            return _number(node, _NUMBERS.construct_yaml_int, "a whole number")
        case "float":
            return _number(node, _NUMBERS.construct_yaml_float, "a number")
    raise YamlRefused(line, f"the tag {node.tag} is not allowed")


def _number(node: yaml.ScalarNode, read: Callable[[yaml.ScalarNode], float], kind: str) -> float:
    try:
        return read(node)
    except (ValueError, IndexError) as error:
        raise YamlRefused(
            node.start_mark.line + 1, f"{show(str(node.value))} is not {kind}"
        ) from error
