"""The memory of a simulated process: a small pool whose items hold tokens instead of KV, found by their address.

A token is 8 bytes and says what the item holds: which room, buffer and position, written by which attempt of the
forward. So content is compared in one integer, and a wrong one can be read by a person.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.testing.pool import POISON, Pool
from protocols.ids import RoomKey
from protocols.layout import LayerBuffer

TOKEN_BYTES = 8
POISON_TOKEN = int.from_bytes(bytes([POISON] * TOKEN_BYTES), "little")
MARK = 0xA5

Tokens = npt.NDArray[np.uint64]


class Token(NamedTuple):
    """What one item holds. ``buffer`` is the buffer's code, see `Memory.code`; positions are absolute pages of the
    request, or indices of state rows; ``attempt`` counts the forwards that wrote this chunk."""

    room: int
    gen: int
    buffer: int
    position: int
    attempt: int

    @property
    def key(self) -> RoomKey:
        return RoomKey(self.room, self.gen)

    def __str__(self) -> str:
        return f"room {self.key} position {self.position} of buffer {self.buffer}, attempt {self.attempt}"


def pack(key: RoomKey, buffer: int, position: int, attempt: int) -> int:
    """The token as a number of 64 bits. Rooms have 16 bits here, generations, buffers and attempts 8, positions 16."""
    return (key.room << 48) | (key.gen << 40) | (buffer << 32) | (position << 16) | (attempt << 8) | MARK


def unpack(number: int) -> Token | None:
    """None for poison and anything else that no forward wrote."""
    if number & 0xFF != MARK or number == POISON_TOKEN:
        return None
    return Token(
        number >> 48 & 0xFFFF, number >> 40 & 0xFF, number >> 32 & 0xFF, number >> 16 & 0xFFFF, number >> 8 & 0xFF
    )


def describe_token(number: int) -> str:
    token = unpack(number)
    if token is not None:
        return str(token)
    return "poison" if number == POISON_TOKEN else f"garbage {number:#x}"


class Item(NamedTuple):
    """One page, slot or row of one buffer."""

    buffer: LayerBuffer
    nth: int

    @property
    def unit(self) -> tuple[str, int]:
        return self.buffer.unit, self.nth

    @property
    def address(self) -> int:
        return self.buffer.address + self.nth * self.buffer.item_len

    def __str__(self) -> str:
        return f"{self.buffer.name}/{self.nth}"


class Memory:
    """A pool seen as items. It outlives its process, so that no address is ever another's."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.layout = pool.layout
        self.buffers = [buffer for buffer in pool.layout.buffers if buffer.unit != "scratch"]
        self._tokens: dict[int, Tokens] = {
            buffer.id: pool.arrays[(buffer.kind, buffer.layer)].view(np.uint64) for buffer in self.buffers
        }
        self._by_unit: dict[str, list[LayerBuffer]] = {}
        for buffer in self.buffers:
            self._by_unit.setdefault(buffer.unit, []).append(buffer)
        self._by_address = sorted(pool.layout.buffers, key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self._by_address]
        self._codes = {buffer.id: code_of(buffer) for buffer in self.buffers}

    def code(self, buffer: LayerBuffer) -> int:
        """The same on both sides for buffers that pair."""
        return self._codes[buffer.id]

    def items_at(self, address: int, nbytes: int) -> list[Item]:
        """The items that these bytes lie in; none for scratch and for memory that is not ours."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return []
        buffer = self._by_address[at]
        if buffer.unit == "scratch" or address + nbytes > buffer.address + buffer.nbytes:
            return []
        first = (address - buffer.address) // buffer.item_len
        last = (address + nbytes - 1 - buffer.address) // buffer.item_len
        return [Item(buffer, index) for index in range(first, last + 1)]

    def read(self, item: Item) -> int:
        """The token an item holds; garbage if its words differ."""
        words = self._tokens[item.buffer.id][item.nth].tolist()
        return int(words[0]) if all(word == words[0] for word in words) else 0

    def write(self, item: Item, number: int) -> None:
        self._tokens[item.buffer.id][item.nth] = number

    def items_of(self, unit: str, nth: int) -> list[Item]:
        """The item of each buffer that one page, slot or row has."""
        return [Item(buffer, nth) for buffer in self._by_unit.get(unit, ())]


_KINDS = ("aux", "state", "mla", "draft_mla", "k", "v", "draft_k", "draft_v")


def code_of(buffer: LayerBuffer) -> int:
    """Kind and layer as a number below 256 (layers below 32)."""
    return _KINDS.index(buffer.kind) << 5 | buffer.layer
