"""The chart as Helm renders it, for the tests of this folder."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_cluster import MachineLacks
from shoal_cluster.programs import find

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "shoal"
PROMETHEUS = "--api-versions=monitoring.coreos.com/v1"
Objects = dict[tuple[str, str], dict[str, Any]]


class Refused(Exception):
    """Helm did not render; the message is what it said."""


@cache
def helm(*arguments: str) -> str:
    """Run helm without a cluster; the same question is asked once. Raises `Refused`."""
    try:
        program = find("helm")
    except MachineLacks as lacking:
        pytest.skip(str(lacking))
    command = [str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def render(values: dict[str, Any] | None = None, *arguments: str) -> Objects:
    """The objects of a release `shoal` in `shoal-system`, by kind and name."""
    found = json.loads(_as_json(rendered_text(values, *arguments)))
    objects = {(each["kind"], name_of(each)): each for each in found}
    assert len(objects) == len(found), "two objects with one name"
    return objects


@cache
def _as_json(text: str) -> str:
    """Its documents; the definitions of the kinds are long, and JSON is read in no time."""
    return json.dumps([each for each in yaml.load_all(text, yaml.CSafeLoader) if each])


def rendered_text(values: dict[str, Any] | None = None, *arguments: str) -> str:
    """As `render`, as text."""
    given = [f"--set-json={name}={json.dumps(value)}" for name, value in (values or {}).items()]
    where = ("shoal", str(CHART), "--namespace=shoal-system")
    return helm("template", *where, *given, *arguments)


def name_of(each: dict[str, Any]) -> str:
    """`NAME`, or `NAMESPACE/NAME` outside of the release's namespace."""
    namespace, name = each["metadata"].get("namespace", ""), str(each["metadata"]["name"])
    return name if namespace in ("", "shoal-system") else f"{namespace}/{name}"
