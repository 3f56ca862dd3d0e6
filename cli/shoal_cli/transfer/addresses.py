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

from shoal_cli.transfer.local_paths import AddressRefused, resolve_uri
from shoal_cli.transfer.places import Source, Target, TransferRefused
from shoal_protocol.channels import Credentials, open_channel

if TYPE_CHECKING:
    from shoal_cli.transfer.coordinators import JobFolder
    from shoal_protocol.coordinator_client import CoordinatorClient

_COORDINATOR: Final = re.compile(
    r"(coordinator://)?(?P<target>unix:/.+|[^/]+:[0-9]+)/(?P<folder>jobs/[^/]+/(in|out))/?"
)
REMOTE: Final = ("https", "http", "s3", "oci")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What it takes to open addresses: where claims are, and who we are to a coordinator."""

    volumes: Mapping[str, Path] = field(default_factory=dict)
    base: Path = field(default_factory=Path.cwd)
    credentials: Credentials | None = None
    insecure: bool = False

    def source(self, uri: str) -> Source:
        """Where `uri` is read. Raises `TransferRefused`, `AddressRefused`. Inside an event loop."""
        # Each place brings libraries of its own, and a worker needs one or two of them.
        match _scheme(uri):
            case "coordinator":
                return self._job_folder(uri)
            case "s3":
                from shoal_cli.transfer import objects  # noqa: PLC0415

                bucket, key = _bucket(uri)
                return objects.ObjectSource(uri, objects.open_bucket(bucket), key)
            case "https" | "http":
                from shoal_cli.transfer import web  # noqa: PLC0415

                web.check_web(uri)
                return web.WebSource(uri, uri, web.open_session(), web.environment_headers())
            case "oci":
                from shoal_cli.transfer import registry, web  # noqa: PLC0415

                return registry.RegistrySource(uri, web.open_session())
            case _:
                from shoal_cli.transfer.folders import FolderSource  # noqa: PLC0415

                return FolderSource(uri, self.local_path(uri), self._claim(uri))

    def target(self, uri: str) -> Target:
        """Where `uri` is written. Raises `TransferRefused`, `AddressRefused`."""
        match _scheme(uri):
            case "coordinator":
                return self._job_folder(uri)
            case "s3":
                from shoal_cli.transfer import objects  # noqa: PLC0415

                bucket, key = _bucket(uri)
                return objects.ObjectTarget(uri, objects.open_bucket(bucket), key)
            case "https" | "http":
                from shoal_cli.transfer import web  # noqa: PLC0415

                web.check_web(uri)
                return web.WebTarget(uri, web.open_session(), web.environment_headers())
            case "oci":
                raise TransferRefused(f"{uri}: nothing can be written to oci://")
            case _:
                from shoal_cli.transfer.folders import FolderTarget  # noqa: PLC0415

                return FolderTarget(uri, self.local_path(uri))

    def coordinator(self, target: str) -> "CoordinatorClient":
        """A client of the coordinator at a gRPC target. Raises `channels.AddressRefused`."""
        from shoal_protocol.coordinator_client import CoordinatorClient  # noqa: PLC0415

        return CoordinatorClient(open_channel(target, self.credentials, insecure=self.insecure))

    def local_path(self, uri: str) -> Path:
        """The path that a local address names; it need not exist. Raises `AddressRefused`."""
        if uri.startswith("pvc://") and self._claim_name(uri) not in self.volumes:
            raise AddressRefused(uri, f"say --volume {self._claim_name(uri)}=DIR")
        return resolve_uri(uri, self.base, self.volumes)

    def _claim(self, uri: str) -> Path | None:
        return self.volumes[self._claim_name(uri)] if uri.startswith("pvc://") else None

    def _claim_name(self, uri: str) -> str:
        return uri.removeprefix("pvc://").partition("/")[0]

    def _job_folder(self, uri: str) -> "JobFolder":
        from shoal_cli.transfer.coordinators import JobFolder  # noqa: PLC0415

        match = _COORDINATOR.fullmatch(uri)
        if match is None:
            raise TransferRefused(f"{uri}: write coordinator://HOST:PORT/jobs/JOB/in, or .../out")
        return JobFolder(uri, self.coordinator(match["target"]), match["folder"])


def is_remote(uri: str) -> bool:
    """Whether an address is of another machine than those that claims and paths are on."""
    scheme, separator, _ = uri.partition("://")
    return bool(separator) and scheme in REMOTE


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
