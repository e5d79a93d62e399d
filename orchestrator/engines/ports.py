"""The TCP ports of an engine: which it listens on, and keeping them from the next engine once it is gone.

A writer that still holds the session of a deleted engine would reach whatever listens on its ports next: a write to a
deleted session was seen to COMPLETE into the pool after a later engine had taken the port.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def listening_ports() -> frozenset[int]:
    """The TCP ports on which this process listens now (Linux; empty elsewhere)."""
    ours: set[str] = set()
    for fd in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            ours.add(str(fd.readlink()))
    ports: set[int] = set()
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        if table.exists():
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            mine = [row for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in ours]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in mine}
    return frozenset(ports)


class HeldPorts:
    """Plain sockets on an ended engine's ports; whoever connects is reset. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ports: Iterable[int]) -> None:
        self._loop = loop
        self._sockets: list[socket.socket] = []
        self.missed: list[int] = []
        """Ports that somebody else had taken already."""
        for port in ports:
            self._hold(port)

    def _hold(self, port: int) -> None:
        held = False
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((host, port))
                sock.listen(8)  # a socket that merely is bound can be bound over
                sock.setblocking(False)
            except OSError:
                sock.close()
                continue
            held = True
            self._sockets.append(sock)
            self._loop.add_reader(sock.fileno(), self._turn_away, sock)
        if not held:
            self.missed.append(port)

    def _turn_away(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        connection.close()

    def release(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
