"""Certificates: an authority, what it signs, and when that is to be made anew.

One authority per pool signs for everyone in it. A certificate's common name is who its owner is
(docs/kubernetes.md says what each name may do); its alternative names are the hosts that a server
is reached at, and the name itself. Keys are on the curve P-256.

Time enters as data: `now` is an aware datetime. Certificates hold from five minutes before it,
since the clocks of nodes differ.
"""

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFETIME: Final = timedelta(days=3650)
CERTIFICATE_LIFETIME: Final = timedelta(days=90)
DEVICE_LIFETIME: Final = timedelta(days=1)
"""Short: what a device was given ends by itself soon after its node has left the pool."""
LONGEST_NAME: Final = 64
"""What X.509 allows as a common name."""
BEFORE: Final = timedelta(minutes=5)
_SMALLEST_RSA_BITS: Final = 2048
_LARGEST_EXPONENT_BITS: Final = 32
"""Everybody's has 17 at most."""
_REQUEST_BYTES: Final = 16 << 10


class CertificateRefused(Exception):
    """A request that is not signed, or an authority that cannot be used; the text says why."""


class Use(Enum):
    """Which side of a connection a certificate is for."""

    CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and its key, both PEM; the key is not encrypted."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that can sign. `certificate` (PEM) is what others trust."""

    certificate: bytes
    _parsed: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(
        cls, name: str, now: datetime, lifetime: timedelta = AUTHORITY_LIFETIME
    ) -> "Authority":
        """A new authority that trusts itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject, public = _name(name), key.public_key()
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        parsed = (
            _builder(subject, public, now, now + lifetime, authority=True)
            .issuer_name(subject)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(parsed.public_bytes(serialization.Encoding.PEM), parsed, key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> "Authority":
        """An authority from PEM, as a Secret holds it. Raises `CertificateRefused`."""
        try:
            parsed = x509.load_pem_x509_certificate(certificate)
            private = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:
            raise CertificateRefused(f"the authority cannot be read: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise CertificateRefused("the authority's key is not on an elliptic curve")
        if private.public_key() != parsed.public_key():
            raise CertificateRefused("the authority's key is not that of its certificate")
        try:
            basic = parsed.extensions.get_extension_for_class(x509.BasicConstraints).value
        except x509.ExtensionNotFound:
            basic = x509.BasicConstraints(ca=False, path_length=None)
        if not basic.ca:
            raise CertificateRefused("the certificate is no authority's")
        return cls(certificate, parsed, private)

    @property
    def key(self) -> bytes:
        """The authority's key as PEM, for the Secret that keeps it."""
        return _key_pem(self._key)

    def issue(
        self,
        name: str,
        now: datetime,
        *,
        hosts: Sequence[str] = (),
        use: Use = Use.CLIENT,
        lifetime: timedelta = CERTIFICATE_LIFETIME,
    ) -> Issued:
        """A new key with a certificate for `name`; `hosts` are DNS names and addresses of a server.
        Raises `CertificateRefused`."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(key.public_key(), name, hosts, use, now, lifetime)
        return Issued(certificate=certificate, key=_key_pem(key))

    def sign(
        self, request: bytes, name: str, now: datetime, lifetime: timedelta = DEVICE_LIFETIME
    ) -> bytes:
        """The certificate (PEM) of a device that asks for exactly this name.

        Of the request (PKCS #10 in DER) only the name and the key count: what else it asks for is
        not granted. Raises `CertificateRefused`.
        """
        parsed = parse_request(request)
        if parsed.name != name:
            raise CertificateRefused(f"asks for the name {parsed.name[:80]!r}, may have {name!r}")
        return self._sign(parsed.key, name, (), Use.BOTH, now, lifetime)

    def _sign(
        self,
        key: "PublicKey",
        name: str,
        hosts: Sequence[str],
        use: Use,
        now: datetime,
        lifetime: timedelta,
    ) -> bytes:
        end = min(now + lifetime, self._parsed.not_valid_after_utc)
        if end <= now:
            raise CertificateRefused("the authority itself has expired")
        certificate = (
            _builder(_name(name), key, now, end, authority=False)
            .issuer_name(self._parsed.subject)
            .add_extension(x509.ExtendedKeyUsage(use.value), critical=False)
            .add_extension(_alternative_names((name, *hosts)), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def self_signed(name: str, now: datetime, lifetime: timedelta = AUTHORITY_LIFETIME) -> Issued:
    """A server's certificate that only those trust who know its fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = (
        _builder(_name(name), key.public_key(), now, now + lifetime, authority=False)
        .issuer_name(_name(name))
        .add_extension(usage, critical=False)
        .add_extension(_alternative_names([name]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Issued(
        certificate=certificate.public_bytes(serialization.Encoding.PEM), key=_key_pem(key)
    )


def fingerprint_of(certificate: bytes) -> str:
    """The SHA-256 of a certificate (PEM) in hexadecimal."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey


@dataclass(frozen=True, slots=True)
class Request:
    """What counts of a request for a certificate; `fingerprint` names the key."""

    name: str
    key: PublicKey
    fingerprint: bytes


def parse_request(request: bytes) -> Request:
    """A request in DER, proved to come from who has the key. Raises `CertificateRefused`."""
    if len(request) > _REQUEST_BYTES:
        raise CertificateRefused(f"a request of {len(request)} bytes")
    try:
        parsed = x509.load_der_x509_csr(request)
        key = _signable(parsed.public_key())
        proved = parsed.is_signature_valid
        names = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateRefused(f"no request for a certificate: {error}") from error
    if not proved:
        raise CertificateRefused("the request is not signed with its own key")
    match [attribute.value for attribute in names]:
        case [str(name)]:
            pass
        case _:
            raise CertificateRefused("the request does not have exactly one common name")
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return Request(name, key, hashlib.sha256(der).digest())


def _signable(key: object) -> PublicKey:
    """A key of a kind that is signed. Asked first: anybody may send a request, and some keys of RSA
    take fifty times as long to check a signature with."""
    match key:
        case ec.EllipticCurvePublicKey() | ed25519.Ed25519PublicKey():
            return key
        case rsa.RSAPublicKey() if (
            key.key_size >= _SMALLEST_RSA_BITS
            and key.public_numbers().e.bit_length() <= _LARGEST_EXPONENT_BITS
        ):
            return key
        case _:
            raise CertificateRefused("the key is of a kind or size that is not signed")


def renewal_time(certificate: bytes) -> datetime:
    """When a certificate (PEM) is to be replaced: when two thirds of its life have passed."""
    parsed = x509.load_pem_x509_certificate(certificate)
    start, end = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    return start + (end - start) * 2 / 3


def is_fresh(certificate: bytes, now: datetime) -> bool:
    """Whether a certificate (PEM) holds now, and is not to be replaced. One that was made while a
    clock was ahead does not hold yet when that is set."""
    parsed = x509.load_pem_x509_certificate(certificate)
    return parsed.not_valid_before_utc <= now < renewal_time(certificate)


def expiry(certificate: bytes) -> datetime:
    """When a certificate (PEM) ends."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def is_issued_by(certificate: bytes, authority: bytes) -> bool:
    """Whether a certificate was signed by an authority, both PEM."""
    try:
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(
            x509.load_pem_x509_certificate(authority)
        )
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    subject: x509.Name, key: PublicKey, now: datetime, end: datetime, *, authority: bool
) -> x509.CertificateBuilder:
    """What an authority's certificate and those that it signs have in common."""
    constraints = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE)
        .not_valid_after(end)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _name(name: str) -> x509.Name:
    if not 0 < len(name) <= LONGEST_NAME:
        raise CertificateRefused(
            f"{name[:80]!r} has {len(name)} characters; "
            f"a certificate's name has 1 to {LONGEST_NAME}"
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative_names(names: Sequence[str]) -> x509.SubjectAlternativeName:
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return x509.SubjectAlternativeName(found)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
