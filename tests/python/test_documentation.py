"""The examples in Python of README and site run as they are written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINTED = {
    "README.md": (r"\(1, 256\)\n" * 3,),
    "docs/python.md": (
        r"\(1, 256\)\n(\S+\n){100}",
        r"4\n(\(1, 256\)\n){10}",
        r"1 InvalidInput item 1: tensor x: type float64 is not float32\n"
        r".*there is no file \S+missing.onnx None None None\n",
    ),
    "docs/follow.md": (r"\['00000007.npy'\] \[\[1. 1.\]\]\n",),
    "docs/troubleshooting.md": (r"26 13 \[\[2. 2.\]\]\n",),
}
"""What each example prints, by page."""
GIVEN = {
    "README.md": "import numpy as np\narray = np.ones((1, 256), np.float32)\n"
    "items = [{'x': array}] * 3\n",
    "docs/troubleshooting.md": "from onnx import TensorProto, helper, save\n"
    "x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 2]) for n in 'xy')\n"
    "graph = helper.make_graph([helper.make_node('Add', ['x', 'x'], ['y'])], 'newest', [x], [y])\n"
    "save(helper.make_model(graph), 'model.onnx')\n",
}
"""What an example takes as given."""
THEN = {
    "docs/follow.md": "FRAMES.mkdir()\nstore(7, np.ones((1, 2)))\n"
    "print([each.name for each in FRAMES.iterdir()], np.load(FRAMES / '00000007.npy'))\n",
    "docs/troubleshooting.md": "import numpy as np, onnxruntime\n"
    "session = onnxruntime.InferenceSession('older.onnx')\n"
    "made = session.run(None, {'x': np.ones((1, 2), np.float32)})[0]\n"
    "print(model.opset_import[0].version, model.ir_version, made)\n",
}
"""What shows that an example works which prints nothing itself."""


def examples_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_no_page_has_an_example_that_is_not_run() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)): len(examples_of(page)) for page in pages}
    assert {page: number for page, number in found.items() if number} == {
        page: len(printed) for page, printed in PRINTED.items()
    }


@pytest.mark.real
@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page, printed in PRINTED.items() for number in range(len(printed))],
)
def test_an_example_prints_what_it_says(folder: Path, page: str, number: int) -> None:
    example, printed = examples_of(ROOT / page)[number], PRINTED[page][number]
    command = [sys.executable, "-c", GIVEN.get(page, "") + example + THEN.get(page, "")]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(printed, ran.stdout), ran.stdout
