"""A process that serves `Peer` over TLS from the files of a folder, and prints its port."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from shoal_protocol.channels import Credentials
from shoal_protocol.listener import Listener
from shoal_protocol.services import FileContext, FrameContext, add_peer_service
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest


class Echo:
    """Answers what it gets."""

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        async for message in requests:
            await context.write(message)

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        await context.write(request.digest.encode())


async def main(folder: Path) -> None:
    listener = Listener(
        lambda server: add_peer_service(server, Echo()), connections=1000, check_seconds=0.02
    )
    credentials = Credentials(
        ca=folder / "ca.pem", certificate=folder / "server.pem", key=folder / "server.key"
    )
    print(await listener.open("127.0.0.1:0", credentials), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
