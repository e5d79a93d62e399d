"""Addresses: control endpoints, engine sessions, and which of them lie on this host."""

from __future__ import annotations

import ipaddress
import socket

from protocols.errors import ConfigError


def check_address(address: str) -> None:
    """Raise ConfigError unless the address reads ``tcp://HOST:PORT``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not (port.isdecimal() and int(port) <= 65535):
        raise ConfigError("not a control address", address=address, hint="It reads tcp://HOST:PORT.")


def host_of(address: str) -> str:
    """The host in ``tcp://HOST:PORT`` or ``HOST:PORT``, without the brackets of IPv6."""
    return address.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_loopback(address: str) -> bool:
    """Whether only this host can reach ``tcp://HOST:PORT`` or ``HOST:PORT``. A name that must be asked for is not."""
    host = host_of(address)
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_here(ip_address: str) -> bool:
    """Whether an IP address is one of this host's own: another's cannot be bound."""
    ip = _ip(ip_address)
    if ip is None or ip.is_loopback:
        return ip is not None
    with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
