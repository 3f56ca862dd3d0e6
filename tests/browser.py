"""A headless Chromium, spoken to by its debugging protocol: what a person sees of a page.

Debian's `chromium` is enough; nothing of it is downloaded.
"""

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = "chromium"
START_SECONDS = 60.0
DRAW_SECONDS = 60.0
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--remote-debugging-port=0"),
)
_LARGEST_MESSAGE = 256 << 20


@dataclass
class Page:
    """An open page. `complaints` are errors and warnings of its console."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the debugging protocol; events that come meanwhile are noted."""
        number = next(self._numbers)
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message: dict[str, Any] = await self.socket.receive_json(timeout=DRAW_SECONDS)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression on the page."""
        given: dict[str, object] = {"returnByValue": True, "awaitPromise": True}
        answer = await self.call("Runtime.evaluate", expression=script, **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def show(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Open a page in a window of that width, and wait until it has drawn all."""
        self.complaints.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call("Page.navigate", url=path.resolve().as_uri())
        async with asyncio.timeout(DRAW_SECONDS):
            while not await self.evaluate("document.body && document.body.dataset.drawn"):
                await asyncio.sleep(0.05)

    async def picture(self, path: Path, *, height: int | None = None) -> None:
        """Save what is seen as PNG: the whole page, or its uppermost part."""
        size = await self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": height or size[1], "scale": 1}
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def printed(self) -> bytes:
        """The page on paper (A4), as PDF."""
        await self.call("Emulation.setEmulatedMedia", media="print", features=[])
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
        return base64.b64decode((await self.call("Page.printToPDF", **paper))["data"])

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in {"error", "warning"}:
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(str(parameters["entry"]))
            case _:
                pass


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A browser of its own with one page, gone at the end."""
    program = shutil.which(PROGRAM)
    assert program is not None, f"{PROGRAM} is not installed: apt-get install {PROGRAM}"
    with tempfile.TemporaryDirectory(prefix="shoal-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *_OPTIONS,
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                address = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
                async with session.ws_connect(address, max_msg_size=_LARGEST_MESSAGE) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    """Where the browser listens: it writes this file when it does."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int(file.read_text().splitlines()[0])
            await asyncio.sleep(0.05)
