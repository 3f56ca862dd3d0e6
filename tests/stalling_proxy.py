"""A TCP proxy that can stall: connections stay open, and nothing comes through any more."""

import selectors
import socket
import threading
from contextlib import suppress

from shoal_cluster.lifetimes import Lifetime


class StallingProxy(Lifetime):
    """Passes bytes between a port of its own and a target, as long as it is not stalled."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flowing = threading.Event()
        self._flowing.set()
        self._closed = False
        self._sockets: list[socket.socket] = [self._listener]

    def stall(self) -> None:
        """From now on nothing comes through; new connections are accepted and hang as well."""
        self._flowing.clear()

    def flow(self) -> None:
        """Everything comes through again, what was held back first."""
        self._flowing.set()

    def start(self) -> None:
        """Accept connections."""
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Close all of them."""
        self._closed = True
        self._flowing.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                continue
            self._sockets += [near, far]
            threading.Thread(target=self._pass, args=(near, far), daemon=True).start()

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, suppress(OSError, ValueError):
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self._closed:
                for key, _ in selector.select(1.0):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    data = source.recv(65536)
                    self._flowing.wait()
                    if not data:
                        raise OSError("one side has closed")
                    key.data.sendall(data)
        near.close()
        far.close()
