"""Uploads of one file that overlap, break and are retried: what is published is what was announced.

Seeded: the service runs as it does in a coordinator, but its disk work happens in the event loop,
each step some turns late, so that a seed gives one interleaving and always the same.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shoal_coordinator.server.files import FilesService
from shoal_coordinator.server.roles import Roles
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.v1 import files_pb2 as pb

CLIENTS = 3


class LateThreads(ThreadPoolExecutor):
    """Runs what it is given in the event loop, up to four turns later."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(1)
        self._chance = chance

    def submit(self, act: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        loop = asyncio.get_running_loop()

        def run(turns: int) -> None:
            if turns:
                loop.call_soon(run, turns - 1)
                return
            try:
                future.set_result(act(*args, **options))
            except Exception as error:
                future.set_exception(error)

        loop.call_soon(run, self._chance.randrange(4))
        return future


class Broken(Exception):
    """The call was ended by the service."""


class Caller:
    """What a handler knows of its call."""

    def __init__(self, begun: "asyncio.Future[int]") -> None:
        self._begun = begun
        self.stored = False

    async def write(self, answer: pb.PutAnswer) -> None:
        if answer.WhichOneof("message") == "stored":
            self.stored = True
        else:
            self._begun.set_result(answer.offset)

    async def abort(self, code: object, details: str) -> NoReturn:
        raise Broken(f"{code}: {details}")

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


class Uploader:
    """A client that sends a fragment's files in order, over links that break."""

    def __init__(self, service: FilesService, chance: random.Random, breaks: int) -> None:
        self._service = service
        self._chance = chance
        self._breaks = breaks

    async def send(self, path: str, content: bytes) -> None:
        """Send until it is stored."""
        for _ in range(200):
            call = asyncio.create_task(self._call(path, content))
            if self._breaks and self._chance.random() < 0.7:
                self._breaks -= 1
                await self._turns(60)
                call.cancel()  # as gRPC does where the link is lost
            try:
                if await call:
                    return
            except (Broken, asyncio.CancelledError):
                pass
        raise AssertionError(f"{path} was never stored")

    async def _call(self, path: str, content: bytes) -> bool:
        begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def requests() -> AsyncIterator[pb.PutRequest]:
            checksum = hashlib.sha256(content).hexdigest()
            header = pb.PutHeader(path=path, bytes=len(content), sha256=checksum)
            yield pb.PutRequest(header=header)
            at = await begun
            while at < len(content):
                piece = content[at : at + 1 + self._chance.randrange(20)]
                await self._turns(3)
                yield pb.PutRequest(piece=piece)
                at += len(piece)
            yield pb.PutRequest(end=pb.PutEnd())

        caller: Any = Caller(begun)
        await self._service.Put(requests(), caller)
        return bool(caller.stored)

    async def _turns(self, most: int) -> None:
        for _ in range(self._chance.randrange(most)):
            await asyncio.sleep(0)


def made_fragment(chance: random.Random) -> tuple[str, dict[str, bytes]]:
    files = {name: chance.randbytes(80) for name in ("model.onnx", "weights.bin")}
    described = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in files.items()
    }
    manifest = json.dumps({"version": 1, "files": described}).encode()
    return hashlib.sha256(manifest).hexdigest(), {"fragment.json": manifest, **files}


async def uploaded(folder: Path, seed: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What was published, and what was announced, of a fragment and of an input."""
    chance = random.Random(seed)  # noqa: S311 - a repeatable interleaving, no secret
    digest, files = made_fragment(chance)
    threads = LateThreads(chance)
    asyncio.get_running_loop().set_default_executor(threads)
    volume = Volume(folder)
    service = FilesService(volume, Roles(clients=frozenset()), lambda job: False, threads)
    announced = {f"fragments/{digest}/{name}": content for name, content in files.items()}
    announced["jobs/job/in/a.npz"] = chance.randbytes(80)

    async def client() -> None:
        uploader = Uploader(service, chance, breaks=4)
        for path, content in announced.items():
            await uploader.send(path, content)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    assert volume.space.promised_bytes == 0
    whole = (path for path in folder.rglob("*") if path.is_file())
    published = {str(path.relative_to(folder)): path.read_bytes() for path in whole}
    return published, announced


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.minutes)]
)
def test_uploads_of_one_fragment_over_broken_links_publish_what_was_announced(
    tmp_path: Path, seeds: range
) -> None:
    for seed in seeds:
        published, announced = asyncio.run(uploaded(tmp_path / str(seed), seed))
        assert published == announced, f"seed {seed}"
