"""A TCP proxy that delays what passes, in front of a store that is to be slow.

Run as a process: `python -m shoal_cluster.slow_link LISTEN_PORT TARGET_PORT CONTROL_SOCKET`. A line
with a number of seconds, sent to the control socket, sets the delay and is answered with `ok`.
"""

import asyncio
import socket
import sys
from pathlib import Path

_CHUNK_BYTES = 64 * 1024


class _Proxy:
    """Carries bytes both ways; each chunk arrives `delay_seconds` after it was sent."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._delay_seconds = 0.0

    async def serve_control(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._delay_seconds = float(await reader.readline())
        writer.write(b"ok\n")
        await writer.drain()
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:  # the store is down: so is this connection
            writer.transport.abort()
            return
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read at once and write in time, so that a delay costs latency and not throughput."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)

        async def write() -> None:
            while True:
                at, chunk = await due.get()
                await asyncio.sleep(at - loop.time())
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()

        async def read() -> None:
            chunk = b"."
            while chunk:
                chunk = await reader.read(_CHUNK_BYTES)
                await due.put((loop.time() + self._delay_seconds, chunk))

        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(read())
                both.create_task(write())
        except* OSError:  # either side went away: so does the other
            pass
        writer.close()


async def _serve(listen_port: int, target_port: int, control: Path) -> None:
    proxy = _Proxy(target_port)
    control.unlink(missing_ok=True)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", listen_port)
    await asyncio.start_unix_server(proxy.serve_control, control)
    await listener.serve_forever()


def set_delay(control: Path, seconds: float) -> None:
    """Make the proxy with this control socket delay each way by `seconds` from now on."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(control))
        connection.sendall(f"{seconds}\n".encode())
        answer = connection.recv(16)
    assert answer == b"ok\n", f"the proxy answered {answer!r}"


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
