"""What a person does with a cluster: kubectl and helm with its kubeconfig."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_cluster.connection import Connection, RequestFailed, connection
from shoal_cluster.programs import find


class CommandFailed(Exception):
    """kubectl or helm ended with an error; `said` is what it wrote to standard error."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(f"{' '.join(command)}: {said.strip()}")
        self.command = tuple(command)
        self.said = said


@dataclass(frozen=True, slots=True)
class Access:
    """Access to one cluster, by its kubeconfig."""

    kubeconfig: Path

    def kubectl(self, *arguments: str, given: str = "", seconds: float = 120.0) -> str:
        """Run kubectl with `given` as its standard input; returns its standard output.

        Raises:
            CommandFailed: with what it said.
        """
        return self._run("kubectl", arguments, given, seconds)

    def helm(self, *arguments: str, seconds: float = 300.0) -> str:
        """Run helm; returns its standard output.

        Raises:
            CommandFailed: with what it said.
        """
        return self._run("helm", arguments, "", seconds)

    def get(self, *arguments: str) -> Any:
        """What `kubectl get ARGUMENTS -o json` gives, parsed; the options are `Connection.get`'s.

        Raises:
            CommandFailed: with what kubectl would say.
        """
        try:
            return self._connection().get(*arguments)
        except RequestFailed as failed:
            raise CommandFailed(("kubectl", "get", *arguments), str(failed)) from failed

    def apply(self, *manifests: Mapping[str, Any], namespace: str = "default") -> None:
        """Apply the manifests, server side.

        Raises:
            CommandFailed: with what kubectl would say.
        """
        for manifest in manifests:
            try:
                self._connection().apply(manifest, namespace)
            except RequestFailed as failed:
                raise CommandFailed(("kubectl", "apply"), str(failed)) from failed

    def wait_until(
        self, what: str, true: Callable[[], bool], *, seconds: float = 120.0, every: float = 0.25
    ) -> None:
        """Return once `true()`; a kubectl that fails meanwhile counts as not yet.

        Raises:
            TimeoutError: naming `what`, with the last failure.
        """
        until = time.monotonic() + seconds
        last = ""
        while True:
            try:
                if true():
                    return
            except CommandFailed as failed:
                last = f" ({failed})"
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:.0f} s: {what}{last}")
            time.sleep(every)

    def _connection(self) -> Connection:
        return connection(self.kubeconfig, self.kubeconfig.stat().st_mtime_ns)

    def _run(self, program: str, arguments: Sequence[str], given: str, seconds: float) -> str:
        command = (str(find(program)), *arguments)
        done = subprocess.run(
            command,
            # It ends before it has much garbage.
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig), "GOGC": "off"},
            input=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            raise CommandFailed((program, *arguments), done.stderr)
        return done.stdout
