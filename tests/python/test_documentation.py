"""The examples of docs/python.md run as they are written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
PRINTED = (
    r"\(1, 256\)\n(\S+\n){100}",
    r"4\n(\(1, 256\)\n){10}",
    r"1 InvalidInput item 1: tensor x: type double is not float\n"
    r".*there is no file \S+missing.onnx None None None\n",
)


@pytest.mark.real
@pytest.mark.parametrize(("example", "printed"), [*zip(EXAMPLES, PRINTED, strict=True)])
def test_an_example_prints_what_it_says(folder: Path, example: str, printed: str) -> None:
    command = [sys.executable, "-c", example]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(printed, ran.stdout), ran.stdout
