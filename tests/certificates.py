"""Certificates for tests, from the project's own authority."""

from datetime import UTC, datetime
from pathlib import Path

from shoal_operator.pki.authority import Authority, Use
from shoal_protocol.channels import Credentials

HOSTS = ("localhost", "127.0.0.1")


class Pki:
    """An authority with a folder that its certificates are written to."""

    def __init__(self, folder: Path, name: str = "shelf") -> None:
        self.authority = Authority.make(name, datetime.now(UTC))
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.certificate)

    def issue(self, name: str) -> Credentials:
        issued = self.authority.issue(name, datetime.now(UTC), hosts=HOSTS, use=Use.BOTH)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(issued.certificate)
        key.write_bytes(issued.key)
        return Credentials(ca=self.ca, certificate=certificate, key=key)
