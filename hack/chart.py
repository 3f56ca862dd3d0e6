"""Writes the chart's README from its values.yaml, Chart.yaml and values.schema.json; with --check,
says whether it is stale.

.venv/bin/python hack/chart.py [--check]
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "helm" / "shoal"
PAGE = CHART / "README.md"
KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z]+):(?: (?P<value>.+))?$")
HEAD = ("| value | default | meaning |", "|---|---|---|")
TEXT = """\
<!-- Written by `make generate` from values.yaml; do not edit by hand. -->

# The chart of Shoal {version}

{description}

    helm install shoal oci://REGISTRY/charts/shoal --namespace shoal-system --create-namespace

REGISTRY is where a release was pushed; from a checkout it is `helm install shoal helm/shoal`. The
operator, its rights and the kinds are installed; pools, models and jobs are yours to apply.
[Installing](../../docs/install.md) says how, step by step, [upgrading](../../docs/upgrade.md) what
an upgrade and a rollback do, [security](../../docs/security.md) which rights the operator has.

It needs Kubernetes {kubernetes}. What is not in the table below is refused with its name
(`values.schema.json`), so that a misspelt value is not ignored.

## Values

"""


@dataclass(frozen=True, slots=True)
class Value:
    """One that a user may give: its path, its default as YAML, and what is written above it."""

    path: str
    default: str
    meaning: str


def main() -> None:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        raise SystemExit(f"not current: {PAGE.name} of the chart; run `make generate`")


def page() -> str:
    """The README; a value of which nothing is said has the meaning of one before it with its
    name."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    described = _descriptions(json.loads((CHART / "values.schema.json").read_text()))
    head = TEXT.format(
        version=chart["version"],
        description=chart["description"].strip(),
        kubernetes=chart["kubeVersion"].removeprefix(">=").removesuffix("-0") + " or later",
    )
    rows, meanings = list[str](), dict[str, str]()
    for each in values((CHART / "values.yaml").read_text()):
        name = each.path.rpartition(".")[2]
        text = " ".join(filter(None, (each.meaning, described.get(each.path))))
        meanings[name] = text or meanings[name]
        rows.append(f"| `{each.path}` | `{each.default}` | {_cell(meanings[name])} |")
    return head + "\n".join((*HEAD, *rows)) + "\n"


def values(text: str) -> Iterator[Value]:
    """The leaves of values.yaml in their order. What is written above a group counts for the first
    of it."""
    above: list[str] = []
    groups: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not line.strip():
            above = []
        elif line.lstrip().startswith("#"):
            above.append(line.strip().removeprefix("#").strip())
        elif found := KEY.fullmatch(line):
            indent = len(found["indent"])
            groups = [(depth, key) for depth, key in groups if depth < indent]
            path = ".".join([*(key for _, key in groups), found["key"]])
            if found["value"] is None:
                groups.append((indent, found["key"]))
                continue
            yield Value(path, found["value"], " ".join(above))
            above = []
        else:
            raise ValueError(f"values.yaml: not understood: {line}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _descriptions(schema: dict[str, Any]) -> dict[str, str]:
    """What the schema says of values, by path."""
    found: dict[str, str] = {}

    def walk(node: dict[str, Any], path: tuple[str, ...]) -> None:
        if "$ref" in node:
            node = {**schema["$defs"][node["$ref"].rpartition("/")[2]], **node}
        if "description" in node:
            found[".".join(path)] = node["description"]
        for key, each in node.get("properties", {}).items():
            walk(each, (*path, key))

    walk(schema, ())
    return found


if __name__ == "__main__":
    main()
