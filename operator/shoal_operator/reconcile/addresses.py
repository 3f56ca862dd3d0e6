"""What an address asks of a cluster: which claim is mounted, whether it may be fetched. Pure."""

import re
from typing import Final

from shoal_operator.reconcile.conditions import Cause
from shoal_operator.reconcile.settings import OperatorSettings

_CLAIM: Final = re.compile(r"pvc://([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)(/.*)?")
_OUTSIDE: Final = ("https://", "s3://", "oci://")


def claim_of(uri: str) -> str | None:
    """The claim that a `pvc://CLAIM/PATH` names; None for other addresses."""
    match = _CLAIM.fullmatch(uri)
    return None if match is None else match[1]


def unsuitable(uri: str) -> str | None:
    """Why an address means nothing in a cluster; None if it does mean something."""
    if claim_of(uri) is not None or uri.startswith(_OUTSIDE):
        return None
    if uri.startswith("pvc://"):
        return f"{uri} names no claim; write pvc://CLAIM/PATH"
    return f"{uri} is a file of one machine, for shoal run; in a cluster write pvc://CLAIM/PATH"


def outside(uri: str) -> bool:
    """Whether the address leads out of the cluster."""
    return uri.startswith(_OUTSIDE)


def offline(uri: str, settings: OperatorSettings) -> Cause | None:
    """Why an address is not fetched where nothing is fetched from outside; None: it may be."""
    if not settings.offline or not outside(uri):
        return None
    text = f"{uri} is outside of the cluster, and the operator is installed offline; use pvc://"
    return Cause("Offline", text)
