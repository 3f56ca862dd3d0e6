"""An authority signs what it should, for as long as it should, and nothing else."""

from datetime import UTC, datetime, timedelta
from math import gcd

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal_protocol.pki.authority import (
    Authority,
    CertificateRefused,
    Use,
    expiry,
    is_issued_by,
    renewal_time,
)

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make("shelf", NOW)


def request(
    *names: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None
) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("shoal-operator")]), critical=False
        )
    )
    signed = builder.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.DER)


def costly_key() -> rsa.RSAPrivateKey:
    """One whose signatures take fifty times as long to check as others'."""
    plain = rsa.generate_private_key(65537, 2048).private_numbers()
    p, q = plain.p, plain.q
    order = (p - 1) * (q - 1)
    e = next(each for each in range(2**2000 + 1, 2**2001, 2) if gcd(each, order) == 1)
    d = pow(e, -1, order)
    rest = rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q)
    numbers = rsa.RSAPrivateNumbers(p, q, d, *rest, rsa.RSAPublicNumbers(e, p * q))
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


def test_a_certificate_says_who_where_and_for_how_long(authority: Authority) -> None:
    issued = authority.issue(
        "shelf-coordinator",
        NOW,
        hosts=("shelf-coordinator.default.svc", "10.0.0.7"),
        use=Use.BOTH,
        lifetime=timedelta(days=30),
    )
    assert is_issued_by(issued.certificate, authority.certificate)
    assert expiry(issued.certificate) == NOW + timedelta(days=30)
    assert NOW + timedelta(days=19) < renewal_time(issued.certificate) < NOW + timedelta(days=21)
    parsed = x509.load_pem_x509_certificate(issued.certificate)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "shelf-coordinator",
        "shelf-coordinator.default.svc",
    ]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


def test_of_a_request_only_name_and_key_count(authority: Authority) -> None:
    parsed = x509.load_pem_x509_certificate(authority.sign(request("pi-4"), "pi-4", NOW))
    extensions = parsed.extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["pi-4"]
    uses = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("jetson"), "asks for the name 'jetson', may have 'pi-4'"),
        (request("pi-4", "jetson"), "exactly one common name"),
        (request(), "exactly one common name"),
        (
            request("pi-4", key=rsa.generate_private_key(65537, 1024)),  # noqa: S505 - that is it
            "kind or size",
        ),
        (request("pi-4", key=costly_key()), "kind or size"),
        (request("pi-4")[:-3] + b"\0\0\0", "not signed with its own key"),
        (b"nonsense", "no request for a certificate"),
        (b"x" * 20_000, "a request of 20000 bytes"),
    ],
    ids=["name", "names", "no name", "key", "exponent", "signature", "nonsense", "size"],
)
def test_other_requests_are_refused(authority: Authority, asked: bytes, said: str) -> None:
    with pytest.raises(CertificateRefused) as caught:
        authority.sign(asked, "pi-4", NOW)
    assert said in str(caught.value) or "no request for a certificate" in str(caught.value)


def test_nothing_outlives_the_authority(authority: Authority) -> None:
    end = expiry(authority.certificate)
    late = authority.issue("pi-4", end - timedelta(hours=1), lifetime=timedelta(days=90))
    assert expiry(late.certificate) == end
    with pytest.raises(CertificateRefused, match="the authority itself has expired"):
        authority.issue("pi-4", end)


def test_an_authority_comes_back_from_its_secret(authority: Authority) -> None:
    again = Authority.load(authority.certificate, authority.key)
    assert is_issued_by(again.issue("pi-4", NOW).certificate, authority.certificate)
    other = Authority.make("attic", NOW)
    assert not is_issued_by(other.issue("pi-4", NOW).certificate, authority.certificate)
    leaf = authority.issue("pi-4", NOW)
    for certificate, key, said in (
        (authority.certificate, other.key, "not that of its certificate"),
        (leaf.certificate, leaf.key, "is no authority's"),
        (b"", authority.key, "cannot be read"),
    ):
        with pytest.raises(CertificateRefused, match=said):
            Authority.load(certificate, key)


def test_a_name_that_is_too_long_is_refused(authority: Authority) -> None:
    with pytest.raises(CertificateRefused, match="1 to 64"):
        authority.issue("n" * 65, NOW)
