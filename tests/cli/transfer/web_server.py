"""A web server on loopback that does what is asked of it, wrong things too."""

import contextlib
import hashlib
import http.server
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Web:
    """A server of files on loopback. What was asked is in `asked`: path and Range.

    `break_after` bytes of a body the connection is cut, as often as `breaks` says. `statuses` are
    answered to the next requests in the place of anything else. `ranges` may be switched off.
    What is PUT is in `files` when all of it came. A body comes in segments of `segment` bytes, or
    byte by byte where it drips. Who has no `token` is told where there is
    one: at `/token`, which is good for one request where there is a `next_token`.
    A `silent` server never answers, and reads no body.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    break_after: int = 0
    breaks: int = 0
    statuses: list[int] = field(default_factory=list)
    ranges: bool = True
    tags: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    segment: int = 0
    drips: bool = False
    token: str = ""
    next_token: Callable[[], str] | None = None
    silent: threading.Event | None = None


class _Handler(http.server.BaseHTTPRequestHandler):
    web: Web
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # noqa: PLR0911 - one return an answer
        wanted = self.headers.get("Range")
        self.web.asked.append((self.path, wanted))
        self.web.headers.append(dict(self.headers.items()))
        if self.web.silent is not None:
            self.web.silent.wait(20)
            return None
        path = urllib.parse.unquote(self.path.partition("?")[0])
        authorised = self.headers.get("Authorization") == f"Bearer {self.web.token}"
        if self.web.token and path != "/token" and not authorised:
            challenge = f'Bearer realm="{self.web.url}/token",service="test"'
            return self._answer(401, b"", {"WWW-Authenticate": challenge})
        if authorised and self.web.next_token is not None:
            self.web.token = self.web.next_token()
        if self.web.statuses:
            return self._answer(self.web.statuses.pop(0), b"")
        if path in self.web.redirects:
            return self._answer(302, b"", {"Location": self.web.redirects[path]})
        if path not in self.web.files:
            return self._answer(404, b"")
        content = self.web.files[path]
        tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()[:8]}"'} if self.web.tags else {}
        if wanted is None or not self.web.ranges:
            return self._answer(200, content, tag)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)) + 1, len(content))
        if start >= len(content):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        span = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
        return self._answer(206, content[start:end], {**tag, **span})

    def do_PUT(self) -> None:
        self.web.headers.append(dict(self.headers.items()))
        if self.web.silent is not None:
            self.web.silent.wait(20)
            self.close_connection = True
            return None
        path, size = urllib.parse.unquote(self.path), int(self.headers["Content-Length"])
        content = self.rfile.read(size)
        if len(content) < size:  # broken off
            self.close_connection = True
            return None
        if self.web.statuses:
            return self._answer(self.web.statuses.pop(0), b"")
        if path in self.web.redirects:
            return self._answer(307, b"", {"Location": self.web.redirects[path]})
        self.web.files[path] = content
        return self._answer(201, b"")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.web.breaks and len(body) > self.web.break_after:
            self.web.breaks -= 1
            self.wfile.write(body[: self.web.break_after])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        size = 1 if self.web.drips else self.web.segment or len(body) or 1
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                if len(pieces) > 1:
                    time.sleep(0.05)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - theirs
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients hang up as they please


@contextlib.contextmanager
def serve_web() -> Iterator[Web]:
    """A web server for as long as the context lasts."""
    web = Web()
    handler = type("Handler", (_Handler,), {"web": web})
    with _Server(("127.0.0.1", 0), handler) as server:
        web.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()
