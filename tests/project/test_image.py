"""Each image has what its process imports, and not more than that."""

import json
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from shoal_cluster.images import BASE_IMAGE

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PACKAGES = ("cli", "operator", "coordinator", "agent", "compiler", "planner", "api", "protocol")
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sys.modules, sep="\\n")
"""
# Imports every module of a process where only what its image has can be found.
IMPORT_WITHIN = """
import importlib, json, pkgutil, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
packages, allowed, left_out = json.loads(sys.argv[1])

class Image:
    def find_spec(self, name, path=None, target=None):
        # The standard library has one module more, which is named for the machine.
        if name.partition(".")[0] in {*packages, *allowed} or name.startswith("_sysconfigdata_"):
            return PathFinder.find_spec(name, path, target)

sys.meta_path = [BuiltinImporter, FrozenImporter, Image()]
package = importlib.import_module(packages[0])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if not module.name.endswith("__main__") and module.name not in left_out:
        importlib.import_module(module.name)
"""
# What each image must do without.
FOREIGN = {
    "operator": {"numpy", "onnx", "onnxruntime", "lz4", "zstandard", "obstore", "rich", "typer"},
    "coordinator": {"aiohttp", "cryptography", "kopf", "kubernetes", "onnx", "onnxruntime", "yaml"},
    "worker": {"kopf", "kubernetes", "onnxruntime"},
    "agent": {"aiohttp", "kopf", "kubernetes", "onnx", "rich", "typer", "yaml"},
}
# `shoal run` wants an agent's packages, a standalone coordinator those that sign; a worker runs
# neither. `--otlp` wants the extra shoal[otlp], and says so where that is not there.
OF_LOCAL_MODE = (
    "shoal_coordinator.server.otlp",
    *("shoal_cli.local.whole_model", "shoal_cli.local.verification"),
    *(f"shoal_cli.standalone.{each}" for each in ("folders", "invitations", "serving")),
)
IMAGES = tuple(FOREIGN)


def packages_of(image: str) -> list[str]:
    """The project's packages that an image has, its process first."""
    (found,) = re.findall(rf"&& spread {image} (.+)$", DOCKERFILE, re.MULTILINE)
    assert isinstance(found, str)
    return found.removesuffix("\\").split()


installed = cache(packages_distributions)  # it reads what each of them has listed


def modules_of(image: str) -> set[str]:
    """The top modules of the distributions that an image has."""
    lock = (ROOT / "requirements" / f"{image}.txt").read_text()
    locked = {name.lower() for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    return {
        module
        for module, distributions in installed().items()
        if locked & {re.sub(r"[_.]", "-", each).lower() for each in distributions}
    }


def test_the_base_may_be_given_with_its_digest() -> None:
    assert re.findall(r"^(?:ARG|FROM) .*$", DOCKERFILE, re.MULTILINE)[:2] == [
        f"ARG BASE={BASE_IMAGE}",
        "FROM ${BASE} AS base",
    ]
    stages = re.findall(r"^FROM .* AS ([\w-]+)$", DOCKERFILE, re.MULTILINE)
    sources = re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.MULTILINE)
    assert set(sources) <= {"${BASE}", *stages}, "nothing comes from elsewhere"


@pytest.mark.parametrize("image", IMAGES)
def test_a_process_finds_all_that_it_imports_in_its_image(image: str) -> None:
    allowed = sorted(modules_of(image) | set(sys.stdlib_module_names))
    given = json.dumps([packages_of(image), allowed, OF_LOCAL_MODE])
    command = [sys.executable, "-c", IMPORT_WITHIN, given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_carries_no_package_of_another_process(image: str) -> None:
    assert not modules_of(image) & FOREIGN[image]


def left_out() -> set[str]:
    """Modules that are removed, as Python names them."""
    script = (ROOT / "hack" / "image" / "packages").read_text()
    (removed,) = re.findall(r"^rm -rf ((?:.*\\\n)*.*)$", script, re.MULTILINE)
    paths = [word for word in removed.split() if word != "\\"]
    return {re.sub(r"\.(py|\*\.so)$", "", path).replace("/", ".") for path in paths}


def test_what_the_images_leave_out_is_imported_by_nothing() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, *(f"shoal_{name}" for name in PACKAGES)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert {"onnx", "onnxruntime", "zstandard", "numpy"} <= imported
    gone = left_out()
    assert {"onnx.backend.test", "zstandard.backend_cffi", "numpy.f2py"} <= gone
    assert not {
        name for name in imported if any(f"{name}.".startswith(f"{each}.") for each in gone)
    }


def test_the_image_has_what_is_copied_into_it() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in kept), source
