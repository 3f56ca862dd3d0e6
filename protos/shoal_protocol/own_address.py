"""Which of its addresses this machine has towards another one."""

import socket


def own_address(host: str, port: int) -> str:
    """The address that packets to `host` would come from; nothing is sent. Raises `OSError` where
    there is no way there."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
