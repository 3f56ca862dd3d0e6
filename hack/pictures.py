"""Draw the pictures of README.md and docs anew: a plan, and the page of a run in which a device is
killed.

    PYTHONPATH=tests .venv/bin/python hack/pictures.py

The job of examples/ocr, eight times its lines; the agent of `KILLED` is killed in the middle.
"""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

import browser

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/pictures"
EXAMPLE = ROOT / "examples/ocr"
COPIES = 8
SHOAL = (sys.executable, "-m", "shoal_cli")
KILLED = "pi-4"
RESULTS_BEFORE = 70
WAIT_SECONDS = 120.0
COLOURS = 128
MARGIN = 16
"""Below the last chart that is shown."""
PICTURES = {
    "run.png": (960, False, 2),
    "run-dark.png": (960, True, 2),
    "report.png": (1000, False, 3),
    "report-phone.png": (390, False, 2),
}
"""Width, whether on dark ground, and how many charts are shown."""


def main() -> None:
    """Run, and write the pictures."""
    subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True)
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-pictures-") as name:
        folder = Path(name)
        page = run(folder)
        subprocess.run([*SHOAL, "plan", EXAMPLE, "--svg", TARGET / "plan.svg"], check=True)
        asyncio.run(draw(page))


def run(folder: Path) -> Path:
    """The run; its page."""
    page, outputs = folder / "page.html", folder / "lines/out"
    for number in range(COPIES):
        for path in (EXAMPLE / "lines/in").iterdir():
            target = folder / "lines/in" / f"{number}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    command: list[str | Path] = [*SHOAL, "run", EXAMPLE, "--work", folder / "work"]
    command += ["--volume", f"lines={folder / 'lines'}", "--html", page]
    process = subprocess.Popen(command)
    limit = time.monotonic() + WAIT_SECONDS
    while len(list(outputs.glob("*.npz"))) < RESULTS_BEFORE:
        assert process.poll() is None and time.monotonic() < limit, "there was nobody to kill"  # noqa: PT018 - one reason
        time.sleep(0.02)
    os.kill(agent(folder), signal.SIGKILL)
    assert process.wait() == 0
    return page


def agent(folder: Path) -> int:
    """The process of the agent `KILLED`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").split("\0")
        if KILLED in words and any(word.startswith(str(folder)) for word in words):
            return int(path.parent.name)
    raise SystemExit(f"no agent {KILLED} runs")


async def draw(page: Path) -> None:
    """The pictures of a page, in few colours."""
    async with browser.browsing() as opened:
        for name, (width, dark, charts) in PICTURES.items():
            await opened.show(page, width=width, dark=dark)
            last = f"document.querySelectorAll('section.figure')[{charts - 1}]"
            height = await opened.evaluate(f"{last}.getBoundingClientRect().bottom")
            await opened.picture(TARGET / name, height=math.ceil(height) + MARGIN)
    for name in PICTURES:
        with Image.open(TARGET / name) as picture:
            picture.convert("RGB").quantize(COLOURS).save(TARGET / name, optimize=True)


if __name__ == "__main__":
    main()
