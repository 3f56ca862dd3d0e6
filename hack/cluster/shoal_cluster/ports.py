"""A port to come back to: one that the system gives nobody meanwhile."""

import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def lasting_port() -> int:
    """Below those that the system gives out to whoever asks for any; nobody listens there now."""
    first_given = int(_RANGE.read_text().split()[0])
    while True:
        port = first_given // 2 + secrets.randbelow(first_given // 2)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
