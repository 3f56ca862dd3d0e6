"""An image is built anew when something that it is built from has changed, and only then."""

import dataclasses
from pathlib import Path

import pytest

from shoal_cluster.images import BASE_IMAGE, Image, build_key, copied_files

ROOT = Path(__file__).resolve().parents[2]
BASE = Image(BASE_IMAGE, Path("base-1.tar"))


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A folder to build in."""
    (tmp_path / "code" / "__pycache__").mkdir(parents=True)
    for name in ("code/one.py", "code/__pycache__/one.pyc", "list.txt", "other.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(
        f"FROM {BASE_IMAGE} AS built\nCOPY --chmod=600 list.txt \\\n  code /code/\n"
        "FROM built AS wanted\nCOPY --from=built /code /copy\n"
    )
    return tmp_path


def key(context: Path, base: Image = BASE, target: str = "wanted", *arguments: str) -> str:
    return build_key(base, context / "Dockerfile", context, target, arguments)


def test_nothing_is_built_anew_for_what_no_instruction_copies(context: Path) -> None:
    before = key(context)
    (context / "other.txt").write_text("changed")
    (context / "code" / "__pycache__" / "one.pyc").write_text("changed")
    assert key(context) == before


@pytest.mark.parametrize("name", ["code/one.py", "code/two.py", "list.txt", "Dockerfile"])
def test_a_file_that_is_copied_and_the_dockerfile_count(context: Path, name: str) -> None:
    before = key(context)
    with (context / name).open("a") as file:
        file.write("\n")
    assert key(context) != before


def test_names_modes_and_what_is_asked_for_count(context: Path) -> None:
    before = key(context)
    other_base = dataclasses.replace(BASE, archive=Path("base-2.tar"))
    seen = {before, key(context, other_base), key(context, BASE, "built")}
    seen.add(key(context, BASE, "wanted", "--build-arg=A=1"))
    (context / "list.txt").chmod(0o755)
    seen.add(key(context))
    (context / "code" / "one.py").rename(context / "code" / "uno.py")
    seen.add(key(context))
    assert len(seen) == 6


def test_of_this_repository_every_source_file_counts() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "type=bind" not in dockerfile, "what a mount brings in would not count"
    counted = set(copied_files(dockerfile, ROOT))
    roots = [each for each in ROOT.iterdir() if any(each.glob("shoal_*/__init__.py"))]
    assert len(roots) == 8
    assert {file for root in roots for file in root.rglob("*.py")} <= counted
    images = ("operator", "coordinator", "worker", "agent", "build")
    assert {ROOT / "requirements" / f"{image}.txt" for image in images} <= counted
