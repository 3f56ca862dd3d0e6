"""What `kubectl get --output=json` gives and `kubectl apply --server-side` does, over a connection
that is kept: whoever waits for something asks a thousand times, and a process for each question
costs more than its answer.
"""

import atexit
import functools
import http
import json
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config
from urllib3.exceptions import HTTPError

_TIMEOUT_SECONDS: Final = 30.0
_RETRIES: Final = 4
_KINDS_AT_ONCE: Final = (
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
)
_APPLY: Final = {"fieldManager": "kubectl", "force": "true", "fieldValidation": "Strict"}
_OPTIONS: Final = {"--selector": "labelSelector", "--field-selector": "fieldSelector"}


class RequestFailed(Exception):
    """The API server refuses, does not know the kind, or is not there; as kubectl words it."""


@dataclass(frozen=True, slots=True)
class _Kind:
    path: str
    plural: str
    namespaced: bool
    api_version: str
    name: str


class Connection:
    """Reads from one cluster, and writes to it."""

    def __init__(self, kubeconfig: Path) -> None:
        """With the rights of the kubeconfig's current context."""
        configuration = Configuration()
        load_kube_config(str(kubeconfig), client_configuration=configuration, persist_config=False)
        configuration.retries = _RETRIES
        self._client = ApiClient(configuration)
        atexit.register(self._client.close)
        self._kinds: dict[str, _Kind] = {}

    def get(self, *arguments: str) -> Any:
        """An object (KIND NAME), or `{"items": [...]}` of all kinds in KIND,KIND,...

        Options: --namespace (else "default"), --all-namespaces, --selector, --field-selector.
        Raises `RequestFailed`.
        """
        words = [word for word in arguments if not word.startswith("--")]
        options = [word.partition("=") for word in arguments if word.startswith("--")]
        given = {option: value for option, _, value in options}
        namespace: str | None = given.pop("--namespace", "default")
        if given.pop("--all-namespaces", None) is not None:
            namespace = None
        query = {_OPTIONS[option]: value for option, value in given.items()}
        kinds = [self._kind(name) for name in words[0].lower().split(",")]
        if len(words) > 1:
            return self._ask("GET", _path(kinds[0], namespace, words[1]))
        items: list[Any] = []
        for kind in kinds:
            found = self._ask("GET", _path(kind, namespace), query)["items"]
            items += [{"apiVersion": kind.api_version, "kind": kind.name} | item for item in found]
        return {"items": items}

    def apply(self, manifest: Mapping[str, Any], namespace: str) -> None:
        """Apply a manifest, server side and by force; `namespace` is for one that names none.

        Raises `RequestFailed`, also for a field that the kind does not have.
        """
        metadata = manifest["metadata"]
        group = str(manifest["apiVersion"]).rpartition("/")[0]
        kind = self._kind(f"{manifest['kind']}.{group}".lower())
        path = _path(kind, metadata.get("namespace", namespace), metadata["name"])
        self._ask("PATCH", path, _APPLY, body=manifest)

    def _kind(self, name: str) -> _Kind:
        if name not in self._kinds:
            self._kinds = self._discover()
        if name not in self._kinds:
            raise RequestFailed(f'the server doesn\'t have a resource type "{name}"')
        return self._kinds[name]

    def _discover(self) -> dict[str, _Kind]:
        """By all names of a kind; where two have one name, the core group's or the first."""
        kinds: dict[str, _Kind] = {}
        for root in ("/api", "/apis"):
            for group in self._ask("GET", root, accept=_KINDS_AT_ONCE)["items"]:
                name = group["metadata"].get("name", "")
                for version in group["versions"]:
                    api_version = f"{name}/{version['version']}" if name else version["version"]
                    for each in version["resources"]:
                        kind = _Kind(
                            f"{root}/{api_version}",
                            each["resource"],
                            each["scope"] == "Namespaced",
                            api_version,
                            each["responseKind"]["kind"],
                        )
                        for known_as in _names(each, name):
                            kinds.setdefault(known_as, kind)
        return kinds

    def _ask(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        accept: str = "application/json",
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        if query:
            path += "?" + urllib.parse.urlencode(query)
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/apply-patch+yaml"
        request = self._client.param_serialize(
            *(verb, path),
            header_params=headers,
            body=None if body is None else json.dumps(body),
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*request, _request_timeout=_TIMEOUT_SECONDS)
            answer = response.read()
        except HTTPError as error:
            raise RequestFailed(f"the server cannot be reached: {error}") from error
        if response.status not in {http.HTTPStatus.OK, http.HTTPStatus.CREATED}:
            phrase = http.HTTPStatus(response.status).phrase
            raise RequestFailed(f"Error from server ({phrase}): {answer.decode()}")
        return json.loads(answer)


@functools.lru_cache(maxsize=64)
def connection(kubeconfig: Path, _changed: int) -> Connection:
    """The connection of a kubeconfig as it is since `_changed`, shared by all who ask for it."""
    return Connection(kubeconfig)


def _path(kind: _Kind, namespace: str | None, name: str = "") -> str:
    where = f"/namespaces/{namespace}" if kind.namespaced and namespace is not None else ""
    return f"{kind.path}{where}/{kind.plural}" + (f"/{name}" if name else "")


def _names(resource: Any, group: str) -> tuple[str, ...]:
    plural, singular = resource["resource"], resource["singularResource"]
    kind = str(resource["responseKind"]["kind"]).lower()
    whole = (f"{plural}.{group}", f"{kind}.{group}")
    return (plural, singular, *whole, *resource.get("shortNames", ()))
