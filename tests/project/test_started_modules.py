"""How this program starts Python."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTS = "protos/shoal_protocol/interpreter.py"


@pytest.mark.parametrize("plane", ["agent", "cli", "coordinator", "planner", "protos", "python"])
def test_modules_are_started_so_that_they_import_nothing_of_the_users_folder(plane: str) -> None:
    sources = (ROOT / plane).rglob("*.py")
    starts = {str(each.relative_to(ROOT)) for each in sources if '"-m"' in each.read_text()}
    assert starts <= {STARTS}
