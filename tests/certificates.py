"""Certificates for tests, from the project's own authority."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from shoal_protocol.channels import Credentials
from shoal_protocol.pki.authority import CERTIFICATE_LIFETIME, Authority, Use

HOSTS = ("localhost", "127.0.0.1")


class Pki:
    """An authority with a folder that its certificates are written to."""

    def __init__(self, folder: Path, name: str = "shelf") -> None:
        self.authority = Authority.make(name, datetime.now(UTC))
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.certificate)

    def issue(self, name: str, lifetime: timedelta = CERTIFICATE_LIFETIME) -> Credentials:
        now = datetime.now(UTC)
        issued = self.authority.issue(name, now, hosts=HOSTS, use=Use.BOTH, lifetime=lifetime)
        return self._put(name, issued.certificate, issued.key)

    def issue_for(self, *names: str) -> Credentials:
        """A certificate with several common names, as another authority's software may sign it."""
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        signer = load_pem_private_key(self.authority.key, None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n) for n in names]))
            .issuer_name(x509.load_pem_x509_certificate(self.authority.certificate).subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=1))
            .sign(signer, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return self._put("+".join(names), certificate.public_bytes(Encoding.PEM), private)

    def _put(self, name: str, certificate: bytes, key: bytes) -> Credentials:
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        for path, content in zip(paths, (certificate, key), strict=True):
            path.write_bytes(content)
        return Credentials(ca=self.ca, certificate=paths[0], key=paths[1])
