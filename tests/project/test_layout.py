"""Rules about the repository's files, which no other tool checks."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (
    *("protos", "api", "planner", "compiler"),
    *("coordinator", "operator", "agent", "cli", "python"),
)
FILE_LIMIT_LINES = 450
FUNCTION_LIMIT_LINES = 60
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
# Where packages come from is the user's configuration, and where a checkout stands is nobody's
# business. Written in halves, so that this file passes its own test.
FORBIDDEN = (
    "pypi" + ".org",
    "python" + "hosted",
    "/wo" + "rk/",
    "../sha" + "red",
    "/home" + "/",
    "/ro" + "ot/",
)


@functools.cache
def repository_files() -> list[Path]:
    """Every file that is committed or would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file()]


@functools.cache
def python_files() -> list[Path]:
    """Python files that people write."""
    return [path for path in repository_files() if path.suffix == ".py" and "_pb2" not in path.name]


@dataclass(frozen=True, slots=True)
class Contents:
    """What these rules are about; of the trees of all files together the garbage collector would
    make more work than of parsing them."""

    docstring: str | None
    functions: list[tuple[str, int, int]]
    """Of each function its name, its line, and how many lines follow that one."""
    imports: set[str]
    """By `import NAME`."""


@functools.cache
def contents(path: Path) -> Contents:
    tree = ast.parse(path.read_text())
    functions: list[tuple[str, int, int]] = []
    imports: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.lineno, (node.end_lineno or 0) - node.lineno))
        elif isinstance(node, ast.Import):
            imports |= {each.name for each in node.names}
    return Contents(ast.get_docstring(tree), functions, imports)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Of a whole tree: a tenth of what it is made of. What has statements is among them."""
    found: list[ast.AST] = [tree]
    while found:
        yield (node := found.pop())
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, part, ())
            found += inner if isinstance(inner, list) else ()


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_source_roots_and_tests_are_not_packages() -> None:
    roots = {ROOT / name for name in SOURCE_ROOTS}
    stray = [
        shown(path)
        for path in repository_files()
        if path.name == "__init__.py" and (path.parent in roots or ROOT / "tests" in path.parents)
    ]
    assert not stray, "these would shadow the standard library or break collection"


def test_no_script_bears_the_name_of_a_module_of_the_standard_library() -> None:
    """Its folder is first on the path when it runs, or a neighbour of it does."""
    roots = tuple(ROOT / name for name in ("bench", "tests", "hack"))
    scripts = (path for path in python_files() if any(root in path.parents for root in roots))
    assert not [shown(path) for path in scripts if path.stem in sys.stdlib_module_names]


def test_every_folder_of_a_package_is_a_package() -> None:
    folders = {path.parent for path in python_files() if path.is_relative_to(ROOT)}
    packages = [
        folder
        for folder in folders
        if any(
            folder.is_relative_to(ROOT / root) and folder != ROOT / root for root in SOURCE_ROOTS
        )
    ]
    assert packages
    assert not [shown(folder) for folder in packages if not (folder / "__init__.py").is_file()]


def test_no_file_is_longer_than_one_can_hold_in_the_head() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in python_files()}
    assert not {name: length for name, length in lengths.items() if length > FILE_LIMIT_LINES}


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{shown(path)}:{line} {name}"
        for path in python_files()
        for name, line, following in contents(path).functions
        if following >= FUNCTION_LIMIT_LINES
    ]
    assert not long


def test_every_module_says_what_it_is() -> None:
    sources = [
        path
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in {*SOURCE_ROOTS, "bench", "examples", "hack"}
    ]
    silent = [shown(path) for path in sources if not contents(path).docstring]
    assert not silent


def test_no_package_lets_onnx_runtime_report_to_its_maker() -> None:
    packages = {
        ROOT.joinpath(*path.relative_to(ROOT).parts[:2])
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in SOURCE_ROOTS
        and "onnxruntime" in contents(path).imports
    }
    assert {package.name for package in packages} == {"shoal_agent", "shoal_cli"}
    setting = 'os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")'
    assert all(setting in (package / "__init__.py").read_text() for package in packages)


def test_names_say_what_a_module_is_for() -> None:
    vague = [shown(path) for path in python_files() if {path.stem, path.parent.name} & VAGUE_NAMES]
    assert not vague


@pytest.mark.parametrize("word", FORBIDDEN)
def test_the_repository_names_no_registry_and_no_machine(word: str) -> None:
    naming = [shown(path) for path in repository_files() if word.encode() in path.read_bytes()]
    assert not naming


def test_scripts_can_be_executed() -> None:
    scripts = [path for path in repository_files() if path.read_bytes()[:2] == b"#!"]
    assert scripts
    assert not [shown(path) for path in scripts if not path.stat().st_mode & 0o100]
