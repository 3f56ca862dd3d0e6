"""Every test asserts something: by itself, or by a function that says so in its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ASSERTING = ("assert", "check", "raises", "warns", "fail", "wait_until")
"""How the names of such functions begin; to wait until something holds fails where it does not."""


def all_tests() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("test_"):
                yield f"{path.relative_to(TESTS)}:{node.lineno} {node.name}", node


def asserts(test: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and is_assertion(node))
        for node in ast.walk(test)
    )


def is_assertion(call: ast.Call) -> bool:
    """`pytest.raises`, `np.testing.assert_...`, `assert_results(...)`, `run(..., check=True)`."""
    name = ""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            pass
    checks = any(
        keyword.arg == "check" and getattr(keyword.value, "value", None) is True
        for keyword in call.keywords
    )
    return checks or name.startswith(ASSERTING)


@pytest.mark.parametrize(
    ("code", "does"),
    [
        ("simulate(7)", False),
        ("contextlib.suppress(ValueError)", False),
        ("assert simulate(7)", True),
        ("np.testing.assert_allclose(a, b)", True),
        ("with pytest.raises(ValueError): f()", True),
        ("wait_until('it is there', exists)", True),
        ("subprocess.run(command, check=True)", True),
        ("subprocess.run(command, check=False)", False),
    ],
)
def test_an_assertion_is_told_from_what_is_none(code: str, does: bool) -> None:
    assert asserts(ast.parse(code)) is does


def test_every_test_asserts_something() -> None:
    assert [name for name, test in all_tests() if not asserts(test)] == []
