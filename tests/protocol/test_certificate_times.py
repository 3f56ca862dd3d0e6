"""When certificates expire, as read from their files."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal_protocol.certificate_times import expiration_seconds

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def certificate(end: datetime, name: str = "pi-4") -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key())
    builder = builder.serial_number(1 << 150).not_valid_before(NOW).not_valid_after(end)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize("days", [0, 1, 30, 9_999, 12_000], ids="{} days".format)
def test_the_end_is_what_was_signed(tmp_path: Path, days: int) -> None:
    """Beyond 2050 the time is written in another form."""
    end = NOW + timedelta(days=days, hours=1)
    (tmp_path / "c.pem").write_bytes(certificate(end))
    assert expiration_seconds(tmp_path / "c.pem") == end.timestamp()


def test_the_first_certificate_of_a_chain_counts(tmp_path: Path) -> None:
    own, authority = NOW + timedelta(days=1), NOW + timedelta(days=900)
    (tmp_path / "c.pem").write_bytes(certificate(own) + certificate(authority, "n" * 60))
    assert expiration_seconds(tmp_path / "c.pem") == own.timestamp()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no certificate",
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\n****\n-----END CERTIFICATE-----\n",
        b"\xff\xfe",
    ],
)
def test_what_is_no_certificate_has_no_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.pem").write_bytes(content)
    assert expiration_seconds(tmp_path / "c.pem") is None
    assert expiration_seconds(tmp_path / "missing.pem") is None


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_a_certificate_that_was_cut_off_has_no_end(tmp_path: Path, size: int) -> None:
    """It may still have the bytes that say when it ends, but never another time."""
    end = NOW + timedelta(days=1)
    whole = certificate(end).decode().splitlines()
    body = "".join(whole[1:-1])[: size - size % 4]
    text = "\n".join((whole[0], body, whole[-1]))
    (tmp_path / "c.pem").write_text(text)
    assert expiration_seconds(tmp_path / "c.pem") in (None, end.timestamp())
