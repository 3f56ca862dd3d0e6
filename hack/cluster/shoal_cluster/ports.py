"""Ports for servers that do not choose one themselves, and for those that come back to theirs.

One that the system gave out and took back is one that it gives out again: to the next connection of
any process, which may be open when the server wants its port.
"""

import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def lasting_port(host: str = "127.0.0.1", *, in_a_row: int = 1) -> int:
    """The first of so many, below those that the system gives out to whoever asks for any or
    connects; nobody listens there now."""
    first_given = int(_RANGE.read_text().split()[0])
    while True:
        port = first_given // 2 + secrets.randbelow(first_given // 2 - in_a_row)
        if not any(_is_taken(host, port + each) for each in range(in_a_row)):
            return port


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
