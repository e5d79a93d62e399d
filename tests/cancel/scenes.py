"""The runs in which something is cancelled: small, in virtual time, the same up to that moment; and their books."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.decode import Decode, RoomHandle
from orchestrator.engines.base import Engine, Probe
from orchestrator.engines.faulty import EVERY, Fault, FaultyEngine, nth
from orchestrator.prefill_room import PrefillRoom
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from orchestrator.testing.virtual import VirtualLoop
from orchestrator.trace import TransferResult
from protocols.blocks import Ints
from protocols.breaker import THRESHOLD
from protocols.errors import ClosedError
from protocols.ids import RoomKey, Session

CONFIG = Config(
    layer_group=2,
    connect_timeout_s=1.0,
    bootstrap_timeout_s=3.0,
    progress_timeout_s=2.0,
    waiting_timeout_s=4.0,
    room_timeout_s=5.0,
    commit_timeout_s=2.0,
    pass_timeout_s=3.0,
    drain_timeout_s=0.5,
    ping_interval_s=0.25,
    silence_s=1.0,
    rollover_timeout_s=1.0,
)
ENDED_S = 20.0
"""Virtual seconds: beyond every deadline above."""
KEY = RoomKey(5, 1)
SRC = np.array([9, 3, 4, 5, 20, 21, 7, 8])
DST = [np.array([1, 2, 3, 9, 10, 11, 20, 19]), np.array([8, 7, 6, 5, 4, 3, 2, 1])]
CHUNKS = [(0, 2), (2, 5), (5, 8)]
"""Positions of the chunks: first page, and the one behind the last."""
PAGE = 4


class SlowEngine(FaultyEngine):
    """First contact takes a while, and so does the end, as with a real engine."""

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        await asyncio.sleep(0.004)
        await super().connect(session, probe, timeout)

    async def close(self, drain_timeout: float) -> None:
        await asyncio.sleep(0.9)
        await super().close(drain_timeout)


@dataclass
class Run:
    """What a scene has made: two decodes of one prefill, and a room over all of them."""

    loop: VirtualLoop
    cluster: Cluster
    device: FakeDevice
    engine: FaultyEngine
    handles: list[RoomHandle] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    """What was said to be free while a write that was still under way touched it."""
    rooms: list[PrefillRoom] = field(default_factory=list)
    driving: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def decode(self) -> Decode:
        return self.cluster.decode()

    def expect(self) -> None:
        for number, pages in enumerate(DST):
            with suppress(ClosedError):  # that node was stopped meanwhile
                handle = self.cluster.decode(number).expect(
                    *KEY,
                    self.cluster.addresses,
                    pages,
                    total_tokens=len(pages) * PAGE - 1,
                    aux_slot=2,
                    state_rows=[3, 1],
                    destinations=len(DST),
                )
                handle.on_units_free(partial(self._freed, self.cluster.decode_pools[number], pages, "dst"))
                self.handles.append(handle)

    async def forwards(self) -> None:
        """Three chunks, a pass each; the device writes a layer some time after its hook."""
        for first, end in CHUNKS:
            last = end == len(SRC)
            spec = ChunkSpec(
                room=KEY.room,
                gen=KEY.gen,
                start_token=first * PAGE,
                end_token=end * PAGE - last,
                pages=SRC[first:end],
                last=last,
                aux_slot=1 if last else None,
                state_rows=[0, 2] if last else None,
            )
            with self.cluster.prefill().begin_forward([spec]) as forward:
                if first == 0:
                    freed = partial(self._freed, self.cluster.prefill_pools[0], SRC, "src")
                    self.cluster.prefill().on_source_free(*KEY, freed)
                for layer in range(self.cluster.prefill_pools[0].layers):
                    self.launch()
                    forward.layer_end(layer)
                    await asyncio.sleep(0.001)
                self.launch()
            self._note_room()

    def _freed(self, pool: Pool, pages: Ints, end: Literal["src", "dst"]) -> None:
        """The pages may be given away now: no write that is under way may read them, or land in them, unless its engine
        is gone, which is a fence."""
        for batch in self.engine._open.values():
            if end == "dst" and self.cluster.fabric.find(batch.session) is None:
                continue
            touched = set(getattr(batch.blocks, end).tolist())
            for buffer in pool.layout.unit_buffers("page"):
                if touched & set((buffer.address + pages * buffer.item_len).tolist()):
                    self.early.append(f"{end} pages of buffer {buffer.id} are under way")

    def _note_room(self) -> None:
        sender = self.cluster.prefill_nodes[0].sender
        room = sender.rooms.live(KEY) if sender is not None else None
        if room is not None and room not in self.rooms:
            self.rooms.append(room)

    def launch(self) -> None:
        """A kernel that is done three milliseconds later."""
        self.device.launch(lambda: None)
        self.loop.call_later(0.003, self.device.step)

    def drive(self, *coroutines: Any) -> None:
        self.driving += [self.loop.create_task(coroutine) for coroutine in coroutines]


Scene = Callable[[Run], Awaitable[None]]
"""Begins what the scene is about and returns; the room then takes its course."""


async def plain(run: Run) -> None:
    """Everything works; the engine takes its time."""
    run.engine.add(Fault(delay_polls=2))
    run.expect()
    run.drive(run.forwards())


async def late_offer(run: Run) -> None:
    """Every chunk is there before the offer is."""
    run.engine.add(Fault(delay_polls=1))

    async def expect_late() -> None:
        await asyncio.sleep(0.05)
        run.expect()

    run.drive(run.forwards(), expect_late())


async def failing(run: Run) -> None:
    """A write fails in the middle, and nothing of it is known to have landed."""
    run.engine.add(Fault(nth(3), fail=EVERY, delay_polls=2))
    run.expect()
    run.drive(run.forwards())


async def held(run: Run) -> None:
    """A write hangs until long after the room's deadlines, while others land."""
    hold = run.engine.add(Fault(nth(2), hold=True))
    run.expect()

    async def release() -> None:
        await asyncio.sleep(ENDED_S / 2)
        hold.release()
        sender = run.cluster.prefill_nodes[0].sender
        if sender is not None:
            sender.pacer.kick()

    run.drive(run.forwards(), release())


async def aborted(run: Run) -> None:
    """The decode ends the room while it is being sent."""
    run.engine.add(Fault(delay_polls=2))
    run.expect()

    async def abort() -> None:
        await asyncio.sleep(0.012)
        run.handles[0].abort("the client went away")

    run.drive(run.forwards(), abort())


async def probed(run: Run) -> None:
    """The destination has failed three rooms, so its breaker is open; the room is the probe."""
    fault = run.engine.add(Fault(fail=EVERY))
    page = len(run.cluster.prefill_pools[0].arrays[("k", 0)]) - 1
    for number in range(THRESHOLD):
        room = KEY.room + 1 + number
        handle = run.decode.expect(
            room, 1, run.cluster.addresses, [page - number - 5], total_tokens=PAGE, aux_slot=4 + number
        )
        run.cluster.forward([ChunkSpec(room=room, gen=1, pages=[page - number], last=True, aux_slot=4)])
        run.loop.call_later(0.003, run.device.run)
        await handle
    run.engine.faults.remove(fault)
    await asyncio.sleep(1.0)
    await plain(run)


SCENES: list[Scene] = [plain, late_offer, failing, held, aborted, probed]


@asynccontextmanager
async def a_run(loop: VirtualLoop, scene: Scene) -> AsyncIterator[Run]:
    """The scene begun; leaving it stops every node and ends the test's own tasks."""
    device = FakeDevice()
    engines: list[SlowEngine] = []

    def wrap(inner: Engine) -> Engine:
        engines.append(SlowEngine(inner))
        return engines[-1]

    cluster = Cluster(
        prefills=[Pool(seed=1, pages=32, state_rows=4)],
        decodes=[Pool(pages=32, state_rows=4) for _ in DST],
        config=CONFIG,
        events=device,
        wrap=wrap,
    )
    async with cluster:
        run = Run(loop, cluster, device, engines[0])
        try:
            await scene(run)
            yield run
        finally:
            for task in run.driving:
                task.cancel()
            await asyncio.gather(*run.driving, return_exceptions=True)


async def ends(run: Run) -> tuple[TransferResult, list[TransferResult]]:
    """Both sides' outcomes, within their deadlines, whatever was cancelled."""
    async with asyncio.timeout(ENDED_S):
        await asyncio.gather(*run.driving)
        decodes = [await handle for handle in run.handles]
        prefill = await run.cluster.prefill().finished(*KEY)
    return prefill, decodes


async def books(run: Run) -> list[str]:
    """What does not balance once everything that is under way has come to its end."""
    async with asyncio.timeout(ENDED_S):
        while (left := unbalanced(run)) and not only_doubt(run, left):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return [] if only_doubt(run, left) else left


def unbalanced(run: Run) -> list[str]:
    """Everything that must be empty or zero, and is not."""
    left = run.cluster.balanced()
    for node in run.cluster.nodes:
        if node.sender is not None:
            lanes = node.sender.sessions.lanes.values()
            permits = [(lane.statistics().window.blocks, lane.statistics().window.bytes) for lane in lanes]
            left += [f"permits {permit}" for permit in permits if permit != (0, 0)]
            left += [f"{len(node.sender.pins)} pages pinned"] if len(node.sender.pins) else []
            left += [f"{len(node.sender._tasks)} tasks of the sender"] if node.sender._tasks else []
        if node.receiver is not None:
            left += [f"{len(node.receiver._tasks)} tasks of the receiver"] if node.receiver._tasks else []
    for room in run.rooms:
        left += [f"{room.outstanding} outstanding"] if room.outstanding else []
        left += [f"{chunk.key}: {chunk.outstanding}" for chunk in room.chunks.values() if chunk.outstanding]
        left += ["an open hand-over" for destination in room.destinations.values() if destination._open]
        left += [f"{chunk.key} still runs" for chunk in room.chunks.values() if chunk.task and not chunk.task.done()]
    return left


def only_doubt(run: Run, left: list[str]) -> bool:
    """Where a write failed its units stay until a fence; nothing else may be left."""
    allowed = set()
    for node in run.cluster.decode_nodes:
        receiver = node.receiver
        if receiver is not None and receiver.book.taken() == receiver.book.quarantined() > 0:
            allowed |= {f"{receiver.book.taken()} units taken", *map(repr, receiver.rooms)}
    return bool(left) and set(left) <= allowed


def check_pages(run: Run, prefill: TransferResult, decodes: list[TransferResult]) -> None:
    """Success means every byte, on every destination, and that the prefill says it only after all decodes do. Nothing
    was free before its last write was over (V5)."""
    assert run.early == []
    source = run.cluster.prefill_pools[0]
    mine = [*range(24, 32)]  # of the rooms before it, where a scene has some
    for pool, pages, result in zip(run.cluster.decode_pools, DST, decodes, strict=False):
        if result.ok:
            assert source.differences(pool, SRC, pages) == []
        assert pool.untouched(np.union1d(pages, mine))
    if prefill.ok:
        assert all(result.ok for result in decodes), "success before the decodes committed"


def nobody_left(loop: VirtualLoop) -> None:
    """No task but the current one, none that was destroyed while it was pending, none that died unheard."""
    gc.collect()
    left = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    assert left == []
    assert loop.failures() == []
