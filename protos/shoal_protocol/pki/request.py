"""One enrolment, as a process of its own: `python -m shoal_protocol.pki.request`.

What it takes to make a key and to read certificates is many MiB of libraries. An idle agent has no
use for them, so they are loaded here, and go with the process. It reads its order as one line of
JSON from standard input (`Order`), and writes its answer as one to standard output. A command that
ends soon calls `enrol` itself.

```
FOLDER/pending/key.pem          made first, and used until there is a certificate for it
FOLDER/SERIAL/key.pem, certificate.pem, ca.pem, identity.json
FOLDER/current -> SERIAL        moved in one step
```

Who signs takes the token with this key alone from then on. So the key is durable before it is shown
to anybody, and what comes with it before it takes the place of what was.
"""

import contextlib
import hashlib
import json
import os
import shutil
import ssl
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal_protocol.certificate_times import minute
from shoal_protocol.channels import client_options
from shoal_protocol.durable_files import replace_file, sync_folder
from shoal_protocol.identities import ENROLMENT
from shoal_protocol.pki.authority import BEFORE
from shoal_protocol.v1.enrolment_pb2 import EnrolRequest, EnrolResponse
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentStub

_CALL_SECONDS: Final = 30.0
_REFUSED: Final = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class Refused(Exception):
    """No certificate, for this reason."""


class NoAnswer(Exception):
    """Nobody is at the target, or not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Where to ask, with which token, for which name, and the folder that it all goes to.

    Trusted there is what the authority in the file `ca` has signed for the target's host; or, with
    a `fingerprint`, the one certificate that has it (`join_lines`).
    """

    target: str
    token: str
    name: str
    folder: str
    ca: str = ""
    fingerprint: str = ""


def enrol(order: Order) -> dict[str, object]:
    """Get a certificate, and make it the current one; what `identity.json` says.

    Raises `Refused`, `NoAnswer`, `OSError`.
    """
    folder = Path(order.folder)
    pending = folder / "pending"
    folder.parent.mkdir(parents=True, exist_ok=True)
    for private in (folder, pending):
        private.mkdir(exist_ok=True, mode=0o700)
        sync_folder(private.parent)
    used = hashlib.sha256(order.token.encode()).hexdigest()
    _keep_key(folder, pending, used)
    key = _key(pending / "key.pem")
    response = _ask(order, _request(key, order.name))
    certificate = _checked(response, key, order.name)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    renew_at = start + (end - start) * 2 / 3
    identity: dict[str, object] = {
        "name": order.name,
        "starts_at": start.timestamp(),
        "renew_at": renew_at.timestamp(),
        # Whatever the clock here says: it was signed just now.
        "renew_after_seconds": (renew_at - start - BEFORE).total_seconds(),
        "expires_at": end.timestamp(),
        "token": used,
        "fingerprint": order.fingerprint,
    }
    replace_file(pending / "certificate.pem", response.certificate_chain)
    replace_file(pending / "ca.pem", response.authority)
    replace_file(pending / "identity.json", json.dumps(identity).encode())
    make_current(folder, pending, f"{certificate.serial_number:x}")
    return identity


def _keep_key(folder: Path, pending: Path, used: str) -> None:
    """Ask with the key that was signed, where the token is still the one that it was signed with: a
    token that comes with another key is taken for stolen. That key is the current one, or of an
    identity that did not become current, since the disk was full or the power failed."""
    for note in folder.glob("*/identity.json"):
        with contextlib.suppress(OSError, ValueError):
            match json.loads(note.read_bytes()):
                case {"token": known} if known == used and note.parent != pending:
                    _write_key(pending / "key.pem", note.with_name("key.pem").read_bytes())


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        try:
            known = serialization.load_pem_private_key(path.read_bytes(), None)
        except ValueError:
            known = None  # torn off when it was written
        if isinstance(known, ec.EllipticCurvePrivateKey):
            return known
    key = ec.generate_private_key(ec.SECP256R1())
    content = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write_key(path, content)
    return key


def _write_key(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _ask(order: Order, request: bytes) -> EnrolResponse:
    options = client_options()
    if order.fingerprint:
        trusted = _pinned(order.target, order.fingerprint)
        options.append(("grpc.ssl_target_name_override", ENROLMENT))
    else:
        trusted = Path(order.ca).read_bytes()
    credentials = grpc.ssl_channel_credentials(root_certificates=trusted)
    with grpc.secure_channel(order.target, credentials, options=options) as channel:
        call = EnrolmentStub(channel).Enrol.future(
            EnrolRequest(token=order.token, certificate_request=request), timeout=_CALL_SECONDS
        )
        code = call.code()
        if code is grpc.StatusCode.OK:
            answer: EnrolResponse = call.result()
            return answer
        raise (Refused if code in _REFUSED else NoAnswer)(f"{code.name}: {call.details()}")


def _pinned(target: str, fingerprint: str) -> bytes:
    """The certificate (PEM) that a server shows, if it is the one with this fingerprint. To look at
    it proves nothing yet: the channel that trusts it alone does."""
    host, _, port = target.rpartition(":")
    try:
        shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=_CALL_SECONDS)
    except ssl.SSLError as error:
        raise NoAnswer(f"what answers at {target} is no coordinator: {error.reason}") from error
    except TimeoutError as error:
        raise NoAnswer(f"nobody answers at {target} within {_CALL_SECONDS:.0f} s") from error
    except OSError as error:
        raise NoAnswer(f"nobody answers at {target}: {error.strerror or error}") from error
    if hashlib.sha256(ssl.PEM_cert_to_DER_cert(shown)).hexdigest() != fingerprint:
        raise Refused(
            f"{target} shows another certificate than the join line names: it is another "
            "coordinator, or somebody between; ask for a new line with `shoal invite`"
        )
    check_clock(shown.encode(), f"the certificate of {target}", datetime.now(UTC))
    return shown.encode()


def check_clock(certificate: bytes, what: str, now: datetime) -> None:
    """Raise `Refused` for a certificate (PEM) that is not valid now, where a clock is off."""
    parsed = x509.load_pem_x509_certificate(certificate)
    start, end = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    if not start <= now < end:
        raise Refused(
            f"{what} is valid from {minute(start.timestamp())} to {minute(end.timestamp())}, and "
            f"the clock here says {minute(now.timestamp())}: set the clock that is wrong, here or "
            "there"
        )


def _checked(
    response: EnrolResponse, key: ec.EllipticCurvePrivateKey, name: str
) -> x509.Certificate:
    """The certificate, if it is what was asked for."""
    try:
        certificate = x509.load_pem_x509_certificates(response.certificate_chain)[0]
        authority = x509.load_pem_x509_certificate(response.authority)
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise Refused(
            f"the certificate is not of the authority that came with it: {error}"
        ) from None
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if [each.value for each in names] != [name]:
        raise Refused(f"the certificate is not for {name}")
    if certificate.public_key() != key.public_key():
        raise Refused("the certificate is for another key")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        check_clock(response.certificate_chain, "the new certificate", datetime.now(UTC))
    return certificate


def make_current(folder: Path, pending: Path, serial: str) -> None:
    """Have `folder/current` be what is in `pending`, in one step; what was before is removed."""
    pending.rename(folder / serial)
    link = folder / "current.new"
    link.unlink(missing_ok=True)
    link.symlink_to(serial)
    sync_folder(folder)
    link.replace(folder / "current")
    sync_folder(folder)
    for other in folder.iterdir():
        if other.is_dir() and not other.is_symlink() and other.name != serial:
            shutil.rmtree(other, ignore_errors=True)


def main() -> int:
    """Do as standard input says; the exit status: 0, or 1 with the reason on standard error."""
    try:
        identity = enrol(Order(**json.load(sys.stdin)))
    except (Refused, NoAnswer, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(identity))
    return 0


if __name__ == "__main__":
    sys.exit(main())
