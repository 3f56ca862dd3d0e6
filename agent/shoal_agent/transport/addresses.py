"""What peers dial to reach this agent."""

from typing import Final

from shoal_protocol.own_address import own_address

_EVERYWHERE: Final = ("0.0.0.0", "[::]")  # noqa: S104 - recognised here, not listened on


def advertised(address: str, port: int) -> str:
    """What peers dial: an address, with the port that was bound where it has none, or 0.

    An IPv6 address may stand alone, as a pod's does; with a port it needs its brackets.
    """
    if address.startswith("unix:"):
        return address
    if address.endswith("]") or ":" not in address:
        return f"{address}:{port}"
    if address.count(":") > 1 and "]" not in address:
        return f"[{address}]:{port}"
    host, _, given = address.rpartition(":")
    return f"{host}:{port}" if given == "0" else address


def reached_at(listen: str, coordinator: str) -> str:
    """Where an agent is reached that listens at `listen`: on all addresses of this machine, that is
    the one that it has towards its coordinator. Raises `OSError` where it has none."""
    host, _, port = listen.rpartition(":")
    if host not in _EVERYWHERE or coordinator.startswith("unix:"):
        return listen
    there, _, there_port = coordinator.rpartition(":")
    try:
        own = own_address(there.strip("[]"), int(there_port))
    except OSError as error:
        raise OSError(f"no way to {coordinator}: {error.strerror or error}") from error
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
