"""The one room most of these tests are about, bad networks, and what to look at afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from orchestrator.chunk import ChunkSpec
from orchestrator.decode import RoomHandle
from orchestrator.engines.faulty import Fault, FaultyEngine
from orchestrator.receiver import Receiver
from orchestrator.sender import Sender
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.blocks import Blocks
from protocols.codec import decode_envelope
from protocols.errors import MalformedFrameError
from protocols.ids import RoomKey, Session
from protocols.layout import LayerBuffer, Layout
from protocols.leases import KINDS, UnitState
from tests.peers.raw import QUICK, RawDecode
from tests.support.waiting import until

SRC = [4, 5, 6, 7]
DST = [1, 2, 3, 9]
TOKENS = 14
KEY = RoomKey(5, 1)
NOWHERE = "tcp://127.0.0.1:19999"
"""An address where nobody listens."""
SOON = 1.0
"""Seconds within which the other side must know of a failure (C3)."""


def cluster(*faults: Fault, **changes: Any) -> Cluster:
    """One prefill, whose engine does as it is told, and one decode."""
    fields: dict[str, Any] = {"prefills": [Pool(seed=1)], "decodes": [Pool()], "config": QUICK, "digest": False}
    return Cluster(**fields | {"wrap": lambda engine: FaultyEngine(engine, *faults)} | changes)


def engine_of(c: Cluster, number: int = 0) -> FaultyEngine:
    engine = c.engines[number]
    assert isinstance(engine, FaultyEngine)
    return engine


def into(pool: Pool, kind: str, layer: int = 0) -> Callable[[Session, Blocks, int], bool]:
    """Match submissions that write into this buffer."""
    array = pool.arrays[(kind, layer)]
    first, end = array.ctypes.data, array.ctypes.data + array.nbytes
    return lambda session, blocks, ordinal: bool(((blocks.dst >= first) & (blocks.dst < end)).any())


def pages_of_blocks(pool: Pool, blocks: Blocks, indices: list[int]) -> list[int]:
    """The pages that these blocks write, byte by byte."""
    return sorted(
        {
            (at - buffer.address) // buffer.item_len
            for index in indices
            for at in range(int(blocks.dst[index]), int(blocks.dst[index] + blocks.length[index]))
            for buffer in pool.layout.unit_buffers("page")
            if buffer.address <= at < buffer.address + buffer.nbytes
        }
    )


async def in_state(handle: RoomHandle, owner: Any, name: str) -> None:
    """Return when the room of this key stands in that state."""
    await until(lambda: (room := owner.rooms.live(handle.key)) is not None and room.machine.state.name == name)


def expect(cluster: Cluster, *, number: int = 0, peers: list[str] | None = None, **changes: Any) -> RoomHandle:
    """Room 5.1 on a decode: four pages and an aux slot, from every prefill of the cluster."""
    fields: dict[str, Any] = {"room": 5, "gen": 1, "pages": DST, "total_tokens": TOKENS, "aux_slot": 2}
    fields["peers"] = cluster.addresses if peers is None else peers
    return cluster.decode(number).expect(**fields | changes)


def spec(**changes: Any) -> ChunkSpec:
    """The same room on a prefill: its only chunk."""
    fields: dict[str, Any] = {"room": 5, "gen": 1, "pages": SRC, "last": True, "end_token": TOKENS, "aux_slot": 1}
    return ChunkSpec(**fields | changes)


def sender(cluster: Cluster, number: int = 0) -> Sender:
    found = cluster.prefill_nodes[number].sender
    assert found is not None
    return found


def receiver(cluster: Cluster, number: int = 0) -> Receiver:
    found = cluster.decode_nodes[number].receiver
    assert found is not None
    return found


async def raw_decode(c: Cluster, **changes: Any) -> RawDecode:
    """A decode that a test plays, with an engine that can be written to; ``changes`` are fields of its Hello."""
    pool = Pool()
    engine = c.fabric.engine()
    for buffer in pool.layout.buffers:
        engine.register(buffer.address, buffer.nbytes)
    raw = RawDecode(c.network, c.addresses[0], pool.layout, engine.session)
    raw.pool = pool
    await raw.connect(**changes)
    return raw


def held(owner: Receiver, *states: UnitState, key: RoomKey = KEY) -> dict[str, list[int]]:
    """The units of a room that are in one of these states (any, if none is named), by kind."""
    lease = owner.book.get(key)
    if lease is None:
        return {}
    chosen = {kind: np.isin(lease.states[kind], states or list(UnitState)) for kind in KINDS}
    found = {kind: sorted(lease.units.of(kind)[chosen[kind]].tolist()) for kind in KINDS}
    return {kind: units for kind, units in found.items() if units}


def landed(src: Pool, dst: Pool, pages: list[int] | None = None, twins: list[int] | None = None) -> bool:
    """Every page of the room holds the source's bytes."""
    return not src.differences(dst, np.array(pages or SRC), np.array(twins or DST))


class Bad:
    """A network that loses the first transmission of every sequenced message, delivers everything else twice, and
    lets each frame overtake the one before it. Deterministic."""

    def __init__(self) -> None:
        self._sent: Counter[tuple[bytes, int]] = Counter()
        self._late: dict[bytes, bytes] = {}

    def __call__(self, direction: str, frame: bytes) -> list[bytes]:
        try:
            envelope = decode_envelope(frame)
        except MalformedFrameError:
            return [frame]
        pair = envelope.src + envelope.dst
        self._sent[pair, envelope.seq] += 1
        if envelope.seq and self._sent[pair, envelope.seq] == 1:
            return []
        if not envelope.dst:  # a Hello says not for whom it is
            return [frame, frame]
        before = self._late.get(pair, frame)
        self._late[pair] = frame
        return [frame, before]


class Losing:
    """A network that loses every message of some types while ``active``; it counts what it lost."""

    def __init__(self, *types: str, direction: str | None = None) -> None:
        self.active = True
        self.lost = 0
        self._types = types
        self._direction = direction

    def __call__(self, direction: str, frame: bytes) -> list[bytes]:
        if self.active and decode_envelope(frame).type in self._types and self._direction in (None, direction):
            self.lost += 1
            return []
        return [frame]


def buffers(layout: Layout, change: Callable[[LayerBuffer], LayerBuffer | None]) -> Layout:
    """The layout with each buffer as ``change`` makes it, or without it."""
    changed = [change(buffer) for buffer in layout.buffers]
    return msgspec.structs.replace(layout, buffers=tuple(buffer for buffer in changed if buffer is not None))
