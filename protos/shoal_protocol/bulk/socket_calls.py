"""System calls on a socket that does not block, each made when the event loop reports it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.eager import Prompt


class SocketCalls:
    """Makes system calls of one kind on a socket, each when the socket is ready for it.

    The call is made where the event loop reports that, and the waiting task goes on there: a turn
    of the loop costs as much as the call. It stays registered while one call follows another.
    """

    def __init__(self, connection: socket.socket, *, write: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._number = connection.fileno()
        self._add = self._loop.add_writer if write else self._loop.add_reader
        self._remove = self._loop.remove_writer if write else self._loop.remove_reader
        self._call: Callable[[], int] | None = None
        self._made: Prompt[int] | None = None
        self._registered = self._closed = False

    def do(self, call: Callable[[], int]) -> Awaitable[int]:
        """Make a call that does not block; what it returns. Raises `TransportBroken`."""
        if self._closed:
            raise TransportBroken("closed")
        made: Prompt[int] = Prompt(loop=self._loop)
        self._made, self._call = made, call
        if not self._registered:
            self._registered = True
            self._add(self._number, self._ready)
        return made

    @property
    def waiting(self) -> bool:
        """Whether a call is to be made when the socket is ready for it."""
        return self._call is not None

    def close(self) -> None:
        self._closed = True
        self._call = None
        self._unregister()
        if self._made is not None and not self._made.done():
            self._made.set_exception(TransportBroken("closed"))
            self._made.exception()  # its task may be cancelled already

    def _ready(self) -> None:
        made, call = self._made, self._call
        if made is None or call is None or made.done():
            self._call = None
            self._unregister()  # nobody waits now
            return
        try:
            count = call()
        except BlockingIOError:
            return
        except OSError as error:
            made.set_exception(gone(error))
            return
        self._call = None  # it has memory that is not the link's
        made.give(count)

    def _unregister(self) -> None:
        if self._registered:
            self._registered = False
            self._remove(self._number)


def gone(error: OSError) -> TransportBroken:
    """What a failed call says of the other side."""
    if isinstance(error, TransportBroken):
        return error
    return TransportBroken(f"the other side has gone: {error.strerror}")
