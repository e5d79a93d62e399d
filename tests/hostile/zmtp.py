"""ZMQ's wire protocol by hand (ZMTP 3.0, no security), for peers that send what no ZMQ library would, as slowly as they
like."""

from __future__ import annotations

import asyncio
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4


def ready(identity: bytes) -> bytes:
    """The command that ends the handshake of a dealer."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
    return bytes([COMMAND, len(body)]) + body


def header(length: int, flags: int = 0) -> bytes:
    return bytes([flags | LONG]) + struct.pack(">Q", length)


class Connection:
    """One TCP connection to a control endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, address: str) -> Connection:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def shake_hands(self, identity: bytes) -> None:
        self.writer.write(GREETING)
        await self.reader.readexactly(64)
        self.writer.write(ready(identity))
        _, length = await self.reader.readexactly(2)
        await self.reader.readexactly(length)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ended(self) -> None:
        """Return when the other side has closed the connection."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self.writer.transport.abort()
