"""The site of docs/ is built strictly: a broken link, or a page that nothing leads to, fails."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(
    folder: Path, pages: dict[str, str], navigation: str = ""
) -> subprocess.CompletedProcess[str]:
    """A site of these pages, made as `make docs` makes the real one but for its navigation."""
    (folder / "docs").mkdir()
    for name, text in pages.items():
        (folder / "docs" / name).write_text(text)
    configuration = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (folder / "mkdocs.yml").write_text(f"{configuration}\n{navigation}\n")
    (recipe,) = re.findall(r"/mkdocs (build.*)", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "mkdocs", *recipe.split(), "--site-dir", str(folder / "site")]
    command += ["--config-file", str(folder / "mkdocs.yml")]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_broken_links_fail(tmp_path: Path) -> None:
    broken = ("gone.md", "index.md#gone", "/gone")
    text = "\n\n".join(f"[gone]({link})" for link in broken)
    built = build(tmp_path, {"index.md": f"# Start\n\n{text}\n"})
    assert built.returncode == 1
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    for complaint in ("gone.md", "#gone", "'/gone'"):
        assert any(complaint in line for line in warnings), built.stderr


def test_a_page_asks_no_other_server_for_anything(tmp_path: Path) -> None:
    built = build(tmp_path, {"index.md": "# Start\n"})
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]*?(?:src|href)=\"?([^\" >]+)", page)
    assert loaded
    assert [address for address in loaded if "//" in address] == []


def test_a_page_that_the_navigation_lacks_fails(tmp_path: Path) -> None:
    pages = {"index.md": "# Start\n", "lost.md": "# Lost\n"}
    built = build(tmp_path, pages, navigation="nav: [index.md]")
    assert built.returncode == 1
    assert "lost.md" in built.stderr
