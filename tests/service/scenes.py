"""What the tests of the transfer path share: bounded waits, a model that writes late, what reached the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.decode import RoomHandle
from orchestrator.engines.base import Engine
from orchestrator.engines.faulty import FaultyEngine, Submission
from orchestrator.forward import ForwardPass
from orchestrator.prefill_room import PrefillRoom
from orchestrator.sender import Sender
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from orchestrator.trace import TransferResult
from protocols.blocks import Ints
from protocols.ids import RoomKey, Session
from protocols.layout import Layout
from tests.support.waiting import until, within

PATIENCE_S = 20.0

both_modes = pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "monolithic"])
both_kinds = pytest.mark.parametrize("kind", ["mha", "mla"])


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def config(**changes: Any) -> Config:
    """Groups of two layers; nothing waits long for a peer that will not answer."""
    return Config(**{"layer_group": 2, "drain_timeout_s": 0.2, "connect_timeout_s": 2.0} | changes)


async def outcomes(cluster: Cluster, handle: RoomHandle, prefill: int = 0) -> tuple[TransferResult, TransferResult]:
    """How the room ended on (prefill, decode), once its books are closed on the prefill."""
    decode: TransferResult = await within(handle)
    room, gen = handle.key
    await within(cluster.prefill(prefill).finished(room, gen))
    await until(lambda: cluster.prefill(prefill).source_free(room, gen), "the source is free")
    return cluster.prefill(prefill).result(room, gen), decode


async def asked_again(cluster: Cluster, passes: int = 4, prefill: int = 0) -> None:
    """Wait until the pacer has asked everything that is pending several times more: what is ready has gone out."""
    pacer = cluster.prefill_nodes[prefill].pacer
    goal = pacer.passes + passes
    await until(lambda: pacer.passes >= goal, "the pacer asks")
    await asyncio.sleep(0)


async def idle_turns(turns: int = 20) -> None:
    """Let everything that is ready on the loop run, without a wait for time."""
    for _ in range(turns):
        await asyncio.sleep(0)


def faulty(cluster: Cluster, number: int = 0) -> FaultyEngine:
    engine = cluster.engines[number]
    assert isinstance(engine, FaultyEngine)
    return engine


def sender(cluster: Cluster, number: int = 0) -> Sender:
    found = cluster.prefill_nodes[number].sender
    assert found is not None
    return found


async def live(cluster: Cluster, room: int, gen: int = 0, number: int = 0) -> PrefillRoom:
    """The room on the prefill, once its loop knows it."""
    rooms, key = sender(cluster, number).rooms, RoomKey(room, gen)
    await until(lambda: rooms.live(key) is not None, "the room is live")
    found = rooms.live(key)
    assert found is not None
    return found


def quarantined(cluster: Cluster, number: int = 0) -> int:
    receiver = cluster.decode_nodes[number].receiver
    assert receiver is not None
    return receiver.book.quarantined()


def taken(cluster: Cluster, number: int = 0) -> int:
    """Units of a decode that are not free."""
    receiver = cluster.decode_nodes[number].receiver
    assert receiver is not None
    return receiver.book.taken()


def wrapped() -> Callable[[Engine], Engine]:
    """For ``Cluster(wrap=...)``: an engine that follows a script, empty to begin with, and logs every submission."""
    return FaultyEngine


Item = tuple[str, int, int]
"""(kind, layer, index) of one page, slot or row."""


def written(log: Iterable[Submission], layout: Layout, session: Session | None = None) -> Counter[Item]:
    """How often each destination item was submitted, by address; every block must be whole items of one buffer."""
    items: Counter[Item] = Counter()
    for entry in log:
        if session is not None and entry.session != session:
            continue
        for address, nbytes in zip(entry.blocks.dst.tolist(), entry.blocks.length.tolist(), strict=True):
            buffer = next(b for b in layout.buffers if b.address <= address < b.address + b.nbytes)
            first, odd = divmod(address - buffer.address, buffer.item_len)
            count, more = divmod(nbytes, buffer.item_len)
            assert (odd, more) == (0, 0), "a block is whole items"
            assert first + count <= buffer.items, "a block lies in one buffer"
            items.update((buffer.kind, buffer.layer, first + nth) for nth in range(count))
    return items


def expected_items(
    layout: Layout, pages: Iterable[int], aux: Sequence[int] = (), rows: Sequence[int] = ()
) -> set[Item]:
    """The naive oracle: every page of every page buffer, the aux slots, the state rows."""
    indices = {"page": list(pages), "aux": list(aux), "state": list(rows)}
    return {(buffer.kind, buffer.layer, index) for buffer in layout.buffers for index in indices.get(buffer.unit, ())}


def once(items: Iterable[Item]) -> Counter[Item]:
    return Counter(dict.fromkeys(items, 1))


class LateModel:
    """A forward whose kernels write when the device gets to them: until then the pages hold what was there before."""

    def __init__(self, pool: Pool, device: FakeDevice, seed: int = 0) -> None:
        self.pool = pool
        self.device = device
        self._rng = np.random.default_rng(seed)

    def layer(self, layer: int, pages: Ints, stream: str = "compute") -> None:
        """Enqueue the kernel that writes these pages in every buffer of the layer."""
        self.device.current_stream = stream
        targets = [array for (name, at), array in self.pool.arrays.items() if at == layer and name not in OTHERS]
        content = [self._rng.integers(0, 256, (len(pages), array.shape[1]), np.uint8) for array in targets]

        def write() -> None:
            for array, new in zip(targets, content, strict=True):
                array[pages] = new

        self.device.launch(write)

    def forward(self, forward: ForwardPass, pages: Ints, layers: int, stream: str = "compute") -> None:
        """Every hooked layer with its hook, then the draft layers, then the end."""
        for layer in range(layers):
            self.layer(layer, pages, stream)
            forward.layer_end(layer)
        for layer in sorted({at for name, at in self.pool.arrays if name.startswith("draft_")}):
            self.layer(layer, pages, stream)
        forward.end()


OTHERS = ("aux", "state", "scratch")


def spec(room: int, pages: Ints, **more: Any) -> ChunkSpec:
    """The only chunk of a room, unless told otherwise."""
    fields: dict[str, Any] = {"room": room, "pages": pages, "last": True}
    return ChunkSpec(**fields | more)
