"""Credentials for the API server: a pod's service account, or the current context of a kubeconfig.

The official client reads both: certificates, tokens, files of tokens, `exec` plugins, OIDC. What
the API server rejects with 401 is loaded again, once for all requests that were rejected together;
a service account's token is read again every minute besides, because an old one may still be valid.
"""

import asyncio
import functools
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import certifi
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

logger = logging.getLogger(__name__)

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LOAD_SECONDS: Final = 60.0
"""An `exec` plugin or an OIDC issuer that has not answered by then counts as failed."""
_TOKEN: Final = "BearerToken"  # noqa: S105 - the official client's name for it
_UNAUTHORIZED: Final = 401


class LoginRefused(ValueError):
    """A cluster does not let us in: names the source of the credentials, and the problem."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source
        self.problem = problem


class Login:
    """Where the API server is, and the credentials for it. `log_in` makes one."""

    def __init__(self, source: str, load: Callable[[Configuration], None]) -> None:
        """`load` brings a configuration up to date; it may block."""
        self._source = source
        self._load = load
        self._loading = asyncio.Lock()
        self._loads = 0
        self.configuration = Configuration()
        self.client: ApiClient | None = None

    async def load(self) -> None:
        """Read the credentials, again if they were read before. Raises `LoginRefused`."""
        self._loads += 1
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                await asyncio.to_thread(self._load, self.configuration)
            if self.client is None:
                self.client = ApiClient(self.configuration)
            elif self.configuration.cert_file:
                certificate, key = self.configuration.cert_file, self.configuration.key_file
                self.tls.load_cert_chain(certificate, key)
        except TimeoutError as error:
            problem = f"its user's login has not answered within {_LOAD_SECONDS:.0f} s"
            raise LoginRefused(self._source, problem) from error
        except Exception as error:
            # A malformed file makes the loader raise anything; so may an OIDC issuer.
            raise LoginRefused(self._source, str(error) or type(error).__name__) from error
        if not (self.configuration.api_key or self.configuration.cert_file):
            problem = "its user has no token and no certificate; if it has `exec`, run its command"
            raise LoginRefused(self._source, problem)

    @property
    def tls(self) -> ssl.SSLContext:
        """How connections are secured; it changes when a certificate is renewed."""
        assert self.client is not None, "nothing was loaded yet"
        context: ssl.SSLContext = self.client.rest_client.ssl_context
        return context

    async def authenticate(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Middleware of an HTTP session: sends the credentials, renewed once if rejected."""
        request.server_hostname = self.configuration.tls_server_name
        sent, loads = await self._authorize(request), self._loads
        response = await handler(request)
        if response.status == _UNAUTHORIZED and await self._renew(sent, loads):
            response.release()
            if self.configuration.cert_file:
                # A connection has shown the certificate that it began with: end it.
                request.headers["Connection"] = "close"
            await self._authorize(request)
            return await handler(request)
        return response

    async def _authorize(self, request: aiohttp.ClientRequest) -> str:
        # A file of a token may end with a newline, which no header may contain.
        value = (await self.configuration.get_api_key_with_prefix(_TOKEN) or "").strip()
        if value:
            request.headers["Authorization"] = value
        return value

    async def _renew(self, rejected: str, loads: int) -> bool:
        """Load again, unless that was done since `loads`; whether another attempt may succeed."""
        async with self._loading:
            if self._loads == loads:
                try:
                    await self.load()
                except LoginRefused as error:
                    logger.warning("%s", error)
        token = str(self.configuration.api_key.get(_TOKEN, "")).strip()
        return token != rejected or bool(self.configuration.cert_file)


async def log_in(kubeconfig: Path | None) -> Login:
    """Log in by a kubeconfig, or as the pod that this runs in. Raises `LoginRefused`."""
    if kubeconfig is None:
        if not (_SERVICE_ACCOUNT / "token").is_file():
            raise LoginRefused(str(_SERVICE_ACCOUNT), "this is no pod; give --kubeconfig FILE")
        login = Login(str(_SERVICE_ACCOUNT), load_incluster_config)
    else:
        login = Login(str(kubeconfig), _loader(kubeconfig))
    await login.load()
    return login


def _loader(path: Path) -> Callable[[Configuration], None]:
    """Reads one kubeconfig, or several with `:` between them, as kubectl merges them: the files
    once, and the credentials that they lead to every time.

    The official client's blocking loader runs in a thread: the other one hands an `exec` plugin no
    cluster, and verifies no OIDC issuer.
    """

    @functools.cache
    def read() -> KubeConfigLoader:
        merged = KubeConfigMerger(os.path.expanduser(path)).config
        if merged is None:
            raise FileNotFoundError("there is no such file")
        for user in merged.value["users"]:
            _verify_issuer(user.value)
        return KubeConfigLoader(merged, config_base_path=None)  # each file's own folder

    def load(configuration: Configuration) -> None:
        read().load_and_set(configuration)
        # It would run an `exec` plugin in the event loop.
        configuration.refresh_api_key_hook = None

    return load


def _verify_issuer(user: dict[str, dict[str, dict[str, dict[str, str]]]]) -> None:
    """Have the loader verify an OIDC issuer, which it does by a named authority only."""
    issuer = user.get("user", {}).get("auth-provider", {}).get("config")
    if issuer is not None and "idp-certificate-authority-data" not in issuer:
        issuer.setdefault("idp-certificate-authority", certifi.where())
