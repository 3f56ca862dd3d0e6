"""The site of docs/ is built strictly: a broken link, or a page that nothing leads to, fails."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file"]
    command += [str(configuration), "--site-dir", str(site)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](index.md#gone)", "#gone"),
        ("[gone](/gone)", "/gone"),
    ],
)
def test_a_broken_link_fails(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{text}\n")
    configuration = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(configuration)
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 1
    assert complaint in built.stderr


def test_a_page_that_the_navigation_lacks_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("index.md", "lost.md"):
        (tmp_path / "docs" / name).write_text("# Start\n")
    configuration = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{configuration}\nnav: [index.md]\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 1
    assert "lost.md" in built.stderr
