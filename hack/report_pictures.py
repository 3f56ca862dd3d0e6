"""Draw the pictures of docs/report.md anew: the page of a run in which a device is killed.

    PYTHONPATH=tests .venv/bin/python hack/report_pictures.py

The job of examples/ocr, eight times its lines; the agent of `KILLED` is killed in the middle.
"""

import asyncio
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
KILLED = "pi-4"
RESULTS_BEFORE = 70
WAIT_SECONDS = 120.0
COLOURS = 64
SIZES = {"report.png": (1000, 1130), "report-phone.png": (390, 1130)}
"""Width, and how much of the height is shown."""


def main() -> None:
    """Run, and write the pictures."""
    subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True)
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-pictures-") as name:
        folder = Path(name)
        page = run(folder)
        asyncio.run(draw(page))


def run(folder: Path) -> Path:
    """The run; its page."""
    page, outputs = folder / "page.html", folder / "lines/out"
    for number in range(COPIES):
        for path in (EXAMPLE / "lines/in").iterdir():
            target = folder / "lines/in" / f"{number}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "shoal_cli",
        "run",
        EXAMPLE,
        "--work",
        folder / "work",
    ]
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
        for name, (width, height) in SIZES.items():
            await opened.show(page, width=width)
            await opened.picture(TARGET / name, height=height)
    for name in SIZES:
        with Image.open(TARGET / name) as picture:
            picture.convert("RGB").quantize(COLOURS).save(TARGET / name, optimize=True)


if __name__ == "__main__":
    main()
