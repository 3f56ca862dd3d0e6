"""Kubeconfigs for tests, and an `exec` plugin that they may name."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

_VERSION = "client.authentication.k8s.io/v1"


def kubeconfig(folder: Path, *, server: str, **user: object) -> Path:
    """A kubeconfig of one cluster and one user."""
    return write(folder, {"server": server}, user)


def with_user(kubeconfig: Path, folder: Path, **user: object) -> Path:
    """A kubeconfig of the same cluster as another one, which is JSON, with another user."""
    [cluster] = json.loads(kubeconfig.read_text())["clusters"]
    return write(folder, cluster["cluster"], user)


def write(folder: Path, cluster: Mapping[str, object], user: Mapping[str, object]) -> Path:
    """A kubeconfig in `folder`, as JSON, which is YAML."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


class Plugin:
    """An `exec` plugin: a script that prints what the test wrote last, and counts its runs."""

    def __init__(self, folder: Path) -> None:
        self._answer, self._runs = folder / "answer.json", folder / "runs"
        self._script = folder / "login-plugin"
        answer, runs = (shlex.quote(str(path)) for path in (self._answer, self._runs))
        self._script.write_text(f"#!/bin/sh\necho run >> {runs}\ncat {answer}\n")
        self._script.chmod(0o700)

    def answer(self, **status: str) -> None:
        """From now on it prints this."""
        credential = {"apiVersion": _VERSION, "kind": "ExecCredential"}
        self._answer.write_text(json.dumps({**credential, "status": status}))

    @property
    def user(self) -> dict[str, str]:
        """How a kubeconfig's user names it: a relative path counts from the kubeconfig's folder."""
        return {
            "apiVersion": _VERSION,
            "interactiveMode": "Never",
            "command": f"./{self._script.name}",
        }

    @property
    def runs(self) -> int:
        """How often it has run."""
        return len(self._runs.read_text().splitlines())
