"""Sides in this process over the real engine and real sockets; the peers that suffer are processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.decode import Decode, RoomHandle
from orchestrator.engines.mooncake import MooncakeEngine
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from orchestrator.receiver import Receiver
from orchestrator.sender import Sender
from orchestrator.testing.pool import Pool
from orchestrator.trace import TransferResult
from protocols.ids import RoomKey
from scripts.soaking.content import Content
from scripts.soaking.process import Worker
from tests.support.waiting import PATIENCE_S, until, within

PAGE = 4
"""Tokens a page."""

POOL: dict[str, Any] = {"pages": 64, "layers": 4, "drafts": 1, "page_size": PAGE, "item_len": 1024, "aux_slots": 16}
LARGE = POOL | {"item_len": 1 << 16}
"""A page of half a MiB in all: a few of them fill what the kernel buffers for a peer that reads nothing."""
CONFIG: dict[str, Any] = {
    "layer_group": 1,
    "ping_interval_s": 0.2,
    "silence_s": 1.0,
    "drain_timeout_s": 0.5,
    "connect_timeout_s": 2.0,
    "room_timeout_s": 30.0,
    "rollover_timeout_s": 5.0,
}
IMPATIENT = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "MC_TCP_STATUS_TIMEOUT_SEC": "1"}
"""A stopped peer's writes are given up after a second instead of five."""


async def asked(worker: Worker, method: str, satisfied: Callable[[Any], object], **arguments: Any) -> Any:
    """Ask the worker again and again until the answer will do, and return that."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not satisfied(answer := await worker.call(method, **arguments)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{worker.role} {method}: the last answer was {answer}") from None
    return answer


class _Here:
    """What both sides have: a node, a pool, content."""

    def __init__(self, pool: dict[str, Any] | None = None, **config: Any) -> None:
        self.pool = Pool(**(pool or POOL))
        self.content = Content(self.pool)
        self.config = Config(**CONFIG | config)
        self.node: Node

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.node.stop()


class PrefillHere(_Here):
    """``async with PrefillHere() as prefill``: the prefill side in this process."""

    async def __aenter__(self) -> PrefillHere:
        self.node = Node()
        self.prefill: Prefill = self.node.start_prefill(MooncakeEngine(), self.pool.layout, config=self.config)
        return self

    @property
    def sender(self) -> Sender:
        assert self.node.sender is not None
        return self.node.sender

    @property
    def address(self) -> str:
        return self.prefill.address

    def forward(self, room: int, gen: int, pages: Sequence[int], *, slot: int = 0) -> None:
        """One chunk, one pass: content, then the hook, layer by layer."""
        spec = ChunkSpec(room=room, gen=gen, pages=list(pages), last=True, aux_slot=slot)
        with self.prefill.begin_forward([spec]) as forward:
            for layer in range(self.pool.layers):
                self.content.write_layer(layer, room, gen, pages, 0)
                forward.layer_end(layer)
            self.content.write_drafts(room, gen, pages, 0)
            self.content.write_aux(room, gen, slot)

    async def offered(self, room: int, gen: int) -> None:
        """Return when the room's offer is here and its destination can be written to."""
        key = RoomKey(room, gen)

        def connected() -> bool:
            live = self.sender.rooms.live(key)
            return live is not None and live.is_complete and all(d.connected for d in live.destinations.values())

        await until(connected, f"room {key} is offered")

    async def ended(self, room: int, gen: int) -> TransferResult:
        result: TransferResult = await within(self.prefill.finished(room, gen))
        return result

    async def source_free(self, room: int, gen: int) -> None:
        await until(lambda: self.prefill.source_free(room, gen), f"the source of {room}.{gen} is free")


class DecodeHere(_Here):
    """The decode side in this process. ``engine`` makes its first engine and those of its rollovers."""

    def __init__(
        self,
        pool: dict[str, Any] | None = None,
        *,
        rollover: bool = True,
        engine: Callable[[], MooncakeEngine] = MooncakeEngine,
        **config: Any,
    ) -> None:
        super().__init__(pool, **config)
        self._engine = engine
        self._rollover = rollover

    async def __aenter__(self) -> DecodeHere:
        self.node = Node()
        renew = self._engine if self._rollover else None
        self.engine = self._engine()
        self.decode: Decode = self.node.start_decode(self.engine, self.pool.layout, self.config, renew)
        return self

    @property
    def receiver(self) -> Receiver:
        assert self.node.receiver is not None
        return self.node.receiver

    def expect(self, room: int, gen: int, peer: str, pages: Sequence[int], *, slot: int = 0) -> RoomHandle:
        return self.decode.expect(room, gen, [peer], list(pages), total_tokens=len(pages) * PAGE, aux_slot=slot)

    def wrong(self, room: int, gen: int, pages: Sequence[int], *, slot: int = 0) -> list[str]:
        """What does not hold the room's bytes."""
        return self.content.differences(room, gen, pages, 0, slot)

    def quarantined(self) -> tuple[int, int]:
        """(unknown, in doubt)"""
        entries = self.decode.quarantine()
        return sum(entry.unknown for entry in entries), sum(entry.in_doubt for entry in entries)


def chunks(pages: int, *, of: int | None = None) -> list[tuple[int, int]]:
    """Token ranges of a room, ``of`` pages a chunk: what a prefill worker process is told."""
    size = of or pages
    return [(first * PAGE, min(first + size, pages) * PAGE) for first in range(0, pages, size)]
