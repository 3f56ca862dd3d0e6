"""A folder of an S3 bucket (`s3://BUCKET/PREFIX`), or one object, through obstore.

Address and credentials come from the environment, in the names that AWS gave them:
`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`
(an `http://` one is used as it is), or a web identity's. Without any the bucket is read as the
public may.

An object appears whole or not at all, that is the store's promise; one that broke off is sent again
from its start. Its checksum is in its metadata, so that it need not be read to be compared.
"""

import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from shoal_cli.transfer.places import (
    PIECE_BYTES,
    Entry,
    OnBytes,
    Passing,
    Read,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    check_name,
    digest_of_stream,
)
from shoal_protocol.digests import Digest, from_hexadecimal, hexadecimal, is_hexadecimal

if TYPE_CHECKING:
    from obstore.store import S3Config

CHECKSUM: Final = "shoal-sha256"
"""The key of an object's metadata."""
_STATUS: Final = re.compile(r"status code: ([1-5][0-9]{2})")
_PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 9000
"""S3 takes 10,000 parts of an object."""
_PARTS_AT_ONCE: Final = 2
_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def open_bucket(bucket: str, environment: Mapping[str, str] = os.environ) -> S3Store:
    """The bucket, as the environment says how to reach it. Raises `TransferRefused`."""
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    endpoint = endpoint or environment.get("AWS_ENDPOINT", "")
    config: S3Config = {"skip_signature": not any(environment.get(name) for name in _CREDENTIALS)}
    if endpoint:
        config["endpoint"] = endpoint
    try:
        return S3Store(
            bucket,
            config=config,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=10),
                # For a whole object; one without a byte for a minute is given up by itself.
                "timeout": timedelta(hours=24),
                "read_timeout": timedelta(seconds=60),
            },
            retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
        )
    except (BaseError, ValueError) as error:
        raise TransferRefused(f"s3://{bucket}: {error}") from error


@dataclass(slots=True)
class Objects(Source, Target):
    """The objects directly below a prefix; as a source also the one object of that name."""

    address: str
    store: S3Store
    key: str
    _keys: dict[str, str] = field(default_factory=dict)

    async def entries(self) -> Sequence[Entry]:
        with translated(self.address):
            if self.key and not self.key.endswith("/"):
                with contextlib.suppress(FileNotFoundError):  # a folder, then
                    return [self._entry(await obstore.head_async(self.store, self.key))]
            listed = await self._list()
        found = (each for each in listed if not _base(each["path"]).startswith("."))
        return sorted((self._entry(each) for each in found), key=lambda entry: entry.name)

    def _entry(self, meta: "obstore.ObjectMeta") -> Entry:
        name = _base(meta["path"])
        self._keys[name] = meta["path"]
        version = meta["version"] or meta["e_tag"] or str(meta["last_modified"].timestamp())
        return Entry(name=name, size_bytes=meta["size"], version=version)

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        if offset >= entry.size_bytes:
            return
        with translated(self.address):
            options: obstore.GetOptions = {"range": {"offset": offset}} if offset else {}
            found = await obstore.get_async(self.store, self._keys[entry.name], options=options)
            if self._entry(found.meta).version != entry.version:
                raise TransferBroken(f"{self.address}: {entry.name} was changed meanwhile")
            async for piece in found.stream(PIECE_BYTES):
                yield bytes(piece)

    async def digest(self, entry: Entry) -> Digest | None:
        with translated(self.address):
            return await self._metadata_digest(self._keys[entry.name])

    async def _list(self) -> Sequence["obstore.ObjectMeta"]:
        listed = await obstore.list_with_delimiter_async(self.store, self.key.rstrip("/"))
        return listed["objects"]

    async def _metadata_digest(self, key: str) -> Digest | None:
        """The digest that an object came with."""
        found = await obstore.get_async(self.store, key, options={"head": True})
        sha256 = str(found.attributes.get(CHECKSUM, ""))
        return from_hexadecimal(sha256) if is_hexadecimal(sha256) else None

    def _key(self, name: str) -> str:
        return f"{self.key.rstrip('/')}/{name}".lstrip("/")

    async def existing(self) -> Mapping[str, int]:
        with translated(self.address):
            return {_base(each["path"]): each["size"] for each in await self._list()}

    async def existing_digest(self, name: str) -> Digest:
        with translated(self.address):
            if known := await self._metadata_digest(self._key(name)):
                return known
            found = await obstore.get_async(self.store, self._key(name))
            return await digest_of_stream(_pieces(found))

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        check_name(entry.name, self.address)
        passing = Passing(entry, read, on_bytes)
        part = max(_PART_BYTES, -(-entry.size_bytes // _MOST_PARTS))
        try:
            with translated(self.address):
                if entry.size_bytes <= _PART_BYTES:
                    whole = b"".join([piece async for piece in passing.pieces()])
                    await self._send(entry, whole, part)
                else:
                    await self._send(entry, passing.pieces(), part)
        except Exception as error:
            if passing.problem in (None, error):
                raise
            raise passing.problem from error

    async def _send(self, entry: Entry, content: bytes | AsyncIterator[bytes], part: int) -> None:
        await obstore.put_async(
            self.store,
            self._key(entry.name),
            content,
            attributes={CHECKSUM: hexadecimal(entry.digest)} if entry.digest else None,
            use_multipart=not isinstance(content, bytes),
            chunk_size=part,
            max_concurrency=_PARTS_AT_ONCE,
        )


async def _pieces(found: "obstore.GetResult") -> AsyncIterator[bytes]:
    async for piece in found.stream(PIECE_BYTES):
        yield bytes(piece)


@contextlib.contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn an error of the store into one of a place."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise _translation(address, error) from error


def _translation(address: str, error: Exception) -> TransferRefused | TransferBroken:
    """An error of the store, by whether another try may succeed."""
    first = str(error).strip().splitlines()[0][:400] if str(error).strip() else type(error).__name__
    answered = _STATUS.search(first)  # listing tells every status as one kind of error
    status = int(answered[1]) if answered else 0
    if isinstance(error, FileNotFoundError) or status == 404:
        return TransferRefused(f"{address}: there is no such object or bucket ({first})")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return TransferRefused(f"{address}: the credentials do not open it ({first})")
    if isinstance(error, InvalidPathError) or (400 <= status < 500 and status not in (408, 429)):
        return TransferRefused(f"{address}: {first}")
    return TransferBroken(f"{address}: {first}")


def _base(key: str) -> str:
    return key.rpartition("/")[2]
