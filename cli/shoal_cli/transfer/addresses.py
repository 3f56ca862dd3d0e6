"""What an address means: the source or the target that it names.

| address                                                              | read | write |
|----------------------------------------------------------------------|------|-------|
| a path, `file:///PATH`, `pvc://CLAIM/PATH`                           | yes  | yes   |
| `s3://BUCKET/PREFIX`                                                 | yes  | yes   |
| `https://...`: one file (`http://` on loopback)                      | yes  |       |
| `https://...`: a folder, files are PUT into it                       |      | yes   |
| `oci://HOST/NAME:TAG`                                                | yes  | no    |
| `coordinator://TARGET/jobs/JOB/in`, or TARGET/jobs/JOB/in; and `out` | yes  | `in`  |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from shoal_cli.transfer.places import Place, Source, Target, TransferRefused, redacted
from shoal_protocol.channels import Credentials, open_channel

if TYPE_CHECKING:
    from shoal_cli.transfer.coordinators import JobFolder
    from shoal_protocol.coordinator_client import CoordinatorClient

_COORDINATOR: Final = re.compile(
    r"(coordinator://)?(?P<target>unix:/.+|[^/]+:[0-9]+)/(?P<folder>jobs/[^/]+/(in|out))/?"
)
_CLAIM: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_REMOTE: Final = ("https", "http", "s3", "oci")


class AddressRefused(Exception):
    """An address that names no file of this machine: which, and what to do about it."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{redacted(address)}: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What it takes to open addresses: where claims are, and who we are to a coordinator."""

    volumes: Mapping[str, Path] = field(default_factory=dict)
    base: Path = field(default_factory=Path.cwd)
    credentials: Credentials | None = None
    insecure: bool = False

    def source(self, uri: str) -> Source:
        """Where `uri` is read. Raises `TransferRefused`, `AddressRefused`. Inside an event loop."""
        place = self._open(uri)
        assert isinstance(place, Source)
        return place

    def target(self, uri: str) -> Target:
        """Where `uri` is written. Raises as `source` does."""
        if _scheme(uri) == "oci":
            raise TransferRefused(f"{uri}: nothing can be written to oci://")
        place = self._open(uri)
        assert isinstance(place, Target)
        return place

    def _open(self, uri: str) -> Place:
        # Each place brings libraries of its own, and a worker needs one or two of them.
        match _scheme(uri):
            case "coordinator":
                return self._job_folder(uri)
            case "s3":
                from shoal_cli.transfer import objects  # noqa: PLC0415

                bucket, key = _bucket(uri)
                return objects.Objects(uri, objects.open_bucket(bucket), key)
            case "https" | "http":
                from shoal_cli.transfer import web  # noqa: PLC0415

                web.check_web(uri)
                return web.WebPlace(uri, web.open_session(), web.environment_headers())
            case "oci":
                from shoal_cli.transfer import registry, web  # noqa: PLC0415

                return registry.RegistrySource(uri, web.open_session())
            case _:
                from shoal_cli.transfer.folders import Folder  # noqa: PLC0415

                path = self.local_path(uri)
                return Folder(uri, path, self.volumes.get(claim_of(uri)))

    def coordinator(self, target: str) -> "CoordinatorClient":
        """A client of the coordinator at a gRPC target. Raises `channels.AddressRefused`."""
        from shoal_protocol.coordinator_client import CoordinatorClient  # noqa: PLC0415

        return CoordinatorClient(open_channel(target, self.credentials, insecure=self.insecure))

    def local_path(self, uri: str) -> Path:
        """The path that a local address names; it need not exist. Raises `AddressRefused`."""
        if uri.startswith("pvc://") and claim_of(uri) not in self.volumes:
            raise AddressRefused(uri, f"say --volume {claim_of(uri)}=DIR")
        return resolve_uri(uri, self.base, self.volumes)

    def _job_folder(self, uri: str) -> "JobFolder":
        from shoal_cli.transfer.coordinators import JobFolder  # noqa: PLC0415

        match = _COORDINATOR.fullmatch(uri)
        if match is None:
            raise TransferRefused(f"{uri}: write coordinator://HOST:PORT/jobs/JOB/in, or .../out")
        return JobFolder(uri, self.coordinator(match["target"]), match["folder"])


def is_remote(uri: str) -> bool:
    """Whether an address is of another machine than those that claims and paths are on."""
    return uri.partition("://")[0] in _REMOTE and "://" in uri


def _scheme(uri: str) -> str:
    if _COORDINATOR.fullmatch(uri):
        return "coordinator"
    scheme, separator, _ = uri.partition("://")
    return scheme if separator else ""


def _bucket(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    if not parts.netloc or parts.query or parts.fragment:
        raise TransferRefused(f"{uri}: write s3://BUCKET/PREFIX")
    return parts.netloc, unquote(parts.path).lstrip("/")


def claim_of(uri: str) -> str:
    """The claim in a `pvc://` address, "" in any other."""
    scheme, _, rest = uri.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else ""


def resolve_uri(uri: str, base: Path, volumes: Mapping[str, Path]) -> Path:
    """The absolute path that an address names; it need not exist.

    `pvc://CLAIM/PATH` lies in the folder `volumes[CLAIM]`, by default `CLAIM` in `base`, and may
    not leave it, neither by `..` nor by a symbolic link. `file:///PATH` is absolute. Anything
    without a scheme is a path, relative to `base`. `AddressRefused` for the rest.
    """
    if "\0" in uri:
        raise AddressRefused(repr(uri), "has a zero byte")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return (base / uri).absolute()
    match scheme:
        case "pvc":
            return _in_claim(uri, rest, base, volumes)
        case "file":
            parts = urlsplit(uri)
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                reason = "write file:///ABSOLUTE/PATH, or a path without file://"
                raise AddressRefused(uri, reason)
            if "?" in uri or "#" in uri:  # what follows is no part of the path
                raise AddressRefused(uri, "write %3F for ? and %23 for #")
            return Path(unquote(parts.path, errors="surrogateescape"))
        case _:
            raise AddressRefused(uri, f"{scheme}:// names no file of this machine")


def _in_claim(uri: str, rest: str, base: Path, volumes: Mapping[str, Path]) -> Path:
    claim, _, inner = rest.partition("/")
    if not _CLAIM.fullmatch(claim):
        raise AddressRefused(uri, "write pvc://CLAIM/PATH")
    if inner.startswith("/") or ".." in inner.split("/"):
        raise AddressRefused(uri, f"leaves the claim {claim}")
    root = volumes.get(claim, base / claim).absolute()
    path = root / inner
    # Where a link inside of the claim points elsewhere, the claim's files are not what is read.
    if not path.resolve().is_relative_to(root.resolve()):
        raise AddressRefused(uri, f"a link leads out of the claim {claim} ({root})")
    return path
