"""Who the operator is to the API server: a pod's service account, or a kubeconfig.

Tokens of a service account are projected and change every hour, so they are read again when they
have aged. A kubeconfig may name a certificate, a token or a token's file; what a cloud's login
program would answer (`exec`) is not run here: use a service account's kubeconfig.
"""

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

import yaml

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_SECONDS: Final = 60.0


class LoginRefused(ValueError):
    """There is no way to log in to a cluster; says what was looked at and what would help."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source
        self.problem = problem


class Token:
    """A bearer token, fixed or in a file that is renewed."""

    def __init__(self, value: str = "", file: Path | None = None) -> None:
        self._value = value
        self._file = file
        self._read_at = -_TOKEN_SECONDS

    def value(self, *, fresh: bool = False) -> str:
        """The token; `fresh`: what was read is not good any more. Empty: there is none."""
        now = monotonic()
        if self._file is not None and (fresh or now - self._read_at > _TOKEN_SECONDS):
            self._value = self._file.read_text(encoding="utf-8").strip()
            self._read_at = now
        return self._value


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the API server is, and how one proves there who one is."""

    server: str
    tls: ssl.SSLContext
    token: Token


def log_in(kubeconfig: Path | None) -> Account:
    """An account from a kubeconfig, or of the pod that this runs in. Raises `LoginRefused`."""
    if kubeconfig is not None:
        return _from_kubeconfig(kubeconfig)
    if (_SERVICE_ACCOUNT / "token").is_file():
        return _from_service_account()
    raise LoginRefused(str(_SERVICE_ACCOUNT), "this is no pod; give --kubeconfig FILE")


def _from_service_account() -> Account:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return Account(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(_SERVICE_ACCOUNT / "ca.crt")),
        token=Token(file=_SERVICE_ACCOUNT / "token"),
    )


def _from_kubeconfig(path: Path) -> Account:
    try:
        document: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LoginRefused(str(path), str(error)) from error
    config = _Config(path, document)
    context = config.entry("contexts", config.text(config.document, "current-context"), "context")
    cluster = config.entry("clusters", config.text(context, "cluster"), "cluster")
    user = config.entry("users", config.text(context, "user"), "user")
    if "exec" in user or "auth-provider" in user:
        raise LoginRefused(str(path), "its user needs a login program; use a token or certificate")
    file = config.text(user, "tokenFile", "")
    return Account(
        server=config.text(cluster, "server").rstrip("/"),
        tls=_tls(config, cluster, user),
        token=Token(config.text(user, "token", ""), path.parent / file if file else None),
    )


@dataclass(frozen=True, slots=True)
class _Config:
    """A parsed kubeconfig; every complaint names the file."""

    path: Path
    document: object

    def entry(self, kind: str, name: str, field: str) -> Mapping[str, object]:
        """The content of a named entry of a list."""
        entries = self.document.get(kind) if isinstance(self.document, Mapping) else None
        for each in entries if isinstance(entries, list) else []:
            if isinstance(each, Mapping) and each.get("name") == name:
                content = each.get(field)
                if isinstance(content, Mapping):
                    return content
        raise LoginRefused(str(self.path), f"{kind} has no {name!r}")

    def text(self, table: object, key: str, default: str | None = None) -> str:
        """A string; required without a default."""
        value = table.get(key, default) if isinstance(table, Mapping) else default
        if not isinstance(value, str):
            raise LoginRefused(str(self.path), f"{key} is missing or no text")
        return value

    def pem(self, table: Mapping[str, object], key: str) -> str | None:
        """PEM given inline (`KEY-data`, base64) or as a file's name (`KEY`)."""
        inline = self.text(table, f"{key}-data", "")
        if inline:
            return base64.b64decode(inline).decode()
        file = self.text(table, key, "")
        return (self.path.parent / file).read_text(encoding="utf-8") if file else None


def _tls(
    config: _Config, cluster: Mapping[str, object], user: Mapping[str, object]
) -> ssl.SSLContext:
    try:
        authority = config.pem(cluster, "certificate-authority")
        certificate = config.pem(user, "client-certificate")
        key = config.pem(user, "client-key")
        tls = ssl.create_default_context(cadata=authority)
        if cluster.get("insecure-skip-tls-verify") is True:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        if certificate and key:
            _load_pair(tls, certificate, key)
    except (OSError, ValueError) as error:
        raise LoginRefused(str(config.path), str(error)) from error
    return tls


def _load_pair(tls: ssl.SSLContext, certificate: str, key: str) -> None:
    """`ssl` takes certificate and key from a file only; it lives as long as the call."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{key}\n{certificate}\n")
        file.flush()
        tls.load_cert_chain(file.name)
