"""What the images leave out of packages, nothing imports."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("cli", "operator", "coordinator", "agent", "compiler", "planner", "api", "protocol"):
    name = f"shoal_{name}"
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sys.modules, sep="\\n")
"""


def left_out() -> set[str]:
    """Modules that are removed, as Python names them."""
    script = (ROOT / "hack" / "image" / "packages").read_text()
    (removed,) = re.findall(r"^rm -rf ((?:.*\\\n)*.*)$", script, re.MULTILINE)
    paths = [word for word in removed.split() if word != "\\"]
    return {re.sub(r"\.(py|\*\.so)$", "", path).replace("/", ".") for path in paths}


def test_what_the_images_leave_out_is_imported_by_nothing() -> None:
    command = [sys.executable, "-c", IMPORT_ALL]
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
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in kept), source
