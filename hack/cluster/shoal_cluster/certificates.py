"""A cluster's certificate authority and what it signs, made by the `openssl` program.

OpenSSL 3 makes and signs a certificate with one command; keys are on the curve P-256, which takes
milliseconds where RSA takes seconds.
"""

import base64
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DAYS = "30"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", _DAYS)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate's file and its key's."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder of its own."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        """Make an authority, and the key pair that service account tokens are signed with."""
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        authority = cls(folder)
        pair = authority.pair
        _openssl(
            ("req", "-x509", *_NEW_KEY, "-subj", "/CN=cluster-ca"),
            ("-keyout", pair.key, "-out", pair.certificate),
        )
        tokens = authority.tokens
        curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        _openssl(("genpkey", *curve), ("-out", tokens.key))
        _openssl(("pkey", "-pubout", "-in", tokens.key), ("-out", tokens.certificate))
        return authority

    @property
    def pair(self) -> Pair:
        """The authority's own certificate and key."""
        return Pair(self.folder / "ca.crt", self.folder / "ca.key")

    @property
    def tokens(self) -> Pair:
        """The public and the private key of service account tokens."""
        return Pair(self.folder / "tokens.pub", self.folder / "tokens.key")

    def sign(self, name: str, *, subject: str, usage: str, addresses: Sequence[str] = ()) -> Pair:
        """A new pair for `subject` ("/O=group/CN=user"), named `name`.

        `usage` is "clientAuth", "serverAuth" or both with a comma; `addresses` are written as
        "IP:10.0.0.1" or "DNS:name".
        """
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        extensions = ["-addext", f"extendedKeyUsage={usage}"]
        if addresses:
            extensions += ["-addext", f"subjectAltName={','.join(addresses)}"]
        authority = self.pair
        _openssl(
            ("req", "-x509", *_NEW_KEY, "-CA", authority.certificate, "-CAkey", authority.key),
            ("-subj", subject, "-addext", "basicConstraints=critical,CA:FALSE", *extensions),
            ("-keyout", pair.key, "-out", pair.certificate),
        )
        return pair

    def write_kubeconfig(self, file: Path, *, server: str, user: Pair) -> Path:
        """Write a kubeconfig, which is JSON here, for `user` at the URL `server`."""
        cluster = {"server": server, "certificate-authority-data": _base64(self.pair.certificate)}
        credentials = {
            "client-certificate-data": _base64(user.certificate),
            "client-key-data": _base64(user.key),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "shoal", "cluster": cluster}],
            "users": [{"name": "admin", "user": credentials}],
            "contexts": [{"name": "shoal", "context": {"cluster": "shoal", "user": "admin"}}],
            "current-context": "shoal",
        }
        file.write_text(json.dumps(document, indent=2))
        file.chmod(0o600)
        return file


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _openssl(*parts: Sequence[str | Path]) -> None:
    command = ["openssl", *(argument for part in parts for argument in part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
