"""The embedder of a simulated prefill process: a scheduler that forms batches and runs forwards on a simulated device.

It keeps the rules of docs/embedding.md: pages of a room are given away only when their source is free and no kernel
of its own still writes them; a chunk whose pass was thrown away runs again only if none of its groups had fired.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.chunk import ChunkSpec
from orchestrator.forward import ForwardPass
from orchestrator.outcome import Outcome, RoomStatus
from orchestrator.pages.ownership import owned
from orchestrator.pages.ranges import Range, chunk_ranges
from orchestrator.testing.oracle import Grant, Unit
from orchestrator.testing.simdecode import UnitPool, remembered
from orchestrator.testing.simhost import AUX_SLOTS, STATE_ROWS, Life
from orchestrator.testing.simmemory import POISON_TOKEN, Item
from orchestrator.testing.simplan import LAYERS, PAGE_SIZE, PREFILL_PAGES, PassPlan, RoomPlan
from protocols.ids import RoomKey
from protocols.layout import CpMode

if TYPE_CHECKING:
    from orchestrator.testing.simhost import World

MAX_BATCH = 3
"""Chunks in one forward."""
MAX_CHUNKS = 1000


@dataclass(slots=True)
class Piece:
    """One chunk of a room, as this rank has it: (page, position) pairs, and what is registered."""

    range: Range
    pages: list[tuple[int, int]]
    spec: ChunkSpec
    plan: PassPlan
    attempt: int = 0


class PrefillRoomJob:
    """One room that this prefill computes."""

    def __init__(self, plan: RoomPlan, grant: Grant, units: list[Unit], pieces: list[Piece]) -> None:
        self.plan = plan
        self.key = RoomKey(*plan.key)
        self.grant = grant
        self.units = units
        self.pieces = pieces
        self.next = 0
        self.running = False
        self.kernels = 0
        """Kernels enqueued that have not run."""
        self.known = False
        self.source_free = False
        self.released = False
        self.outcome: Outcome | None = None
        self.since = (0.0, 0.0)
        """When it was registered, and how long the process had stood still by then."""


class PrefillWorker:
    """See the module. Every method runs in the process."""

    def __init__(self, life: Life) -> None:
        assert life.prefill is not None, "a prefill life has begun"
        assert life.host.group is not None, "a prefill belongs to a group"
        self.life = life
        self.world: World = life.world
        self.face = life.prefill
        self.jobs: list[PrefillRoomJob] = []
        self._group = life.host.group
        self._rank = self._group.prefills.index(int(life.host.name[1:]))
        self._pool = UnitPool(PREFILL_PAGES, AUX_SLOTS, STATE_ROWS)
        self._waiting: list[RoomPlan] = []
        self._wake = asyncio.Event()
        self._open: list[ForwardPass] = []
        """Passes that never end."""
        self.world.loop.spawn(self._schedule(), life.domain, f"{life.name} scheduler")

    # -- rooms -------------------------------------------------------------------------------------------------------

    def compute(self, plan: RoomPlan) -> None:
        """Take pages and queue the room; wait for pages if there are too few."""
        self._waiting.append(plan)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            plan = self._waiting[0]
            ranges = chunk_ranges(plan.tokens, plan.chunks, PAGE_SIZE)
            positions = [self._owned(piece) for piece in ranges]
            aux = self._rank == 0 and not plan.fake
            count = sum(len(mine) for mine in positions)
            units = self._pool.take(count, int(aux), plan.state_rows if aux else 0)
            if units is None:
                return
            self._waiting.pop(0)
            self._queue(plan, ranges, positions, units)

    def _owned(self, piece: Range) -> list[int]:
        first, count = piece.positions(PAGE_SIZE)
        if self._group.kind != "cp":
            return list(range(first, first + count))
        mode: CpMode = "zigzag" if self._group.zigzag else "contiguous"
        return [int(position) for position in owned(first, count, mode, self._rank, 2)]

    def _queue(self, plan: RoomPlan, ranges: tuple[Range, ...], positions: list[list[int]], units: list[Unit]) -> None:
        pages = [index for kind, index in units if kind == "page"]
        aux = [index for kind, index in units if kind == "aux"]
        rows = [index for kind, index in units if kind == "state"]
        places: list[tuple[Unit, int]] = [(("aux", index), 0) for index in aux]
        places += [(("state", index), nth) for nth, index in enumerate(rows)]
        pieces: list[Piece] = []
        for number, (piece, mine) in enumerate(zip(ranges, positions, strict=True)):
            pairs = [(pages.pop(), position) for position in mine]
            places += [(("page", page), position) for page, position in pairs]
            spec = ChunkSpec(
                room=plan.room,
                gen=plan.gen,
                start_token=piece.start_token,
                pages=[page for page, _ in pairs],
                last=piece.last,
                end_token=piece.end_token,
                positions=mine,
                aux_slot=aux[0] if aux and piece.last else None,
                state_rows=rows if piece.last else None,
                fake=plan.fake,
            )
            passes = plan.passes or (PassPlan(),)
            pieces.append(Piece(piece, pairs, spec, passes[min(number, len(passes) - 1)]))
        grant = self.world.oracle.source_granted(self.life.side, RoomKey(*plan.key), places)
        job = PrefillRoomJob(plan, grant, units, pieces)
        self.world.record(self.life.name, "queues room", job.key, [f"{kind}{index}" for kind, index in units])
        self.jobs.append(job)
        self._wake.set()

    # -- forwards ----------------------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            batch = self._form_batch()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._run(batch)

    def _form_batch(self) -> list[PrefillRoomJob]:
        batch: list[PrefillRoomJob] = []
        for job in self.jobs:
            if job.running or job.next >= len(job.pieces) or job.released:
                continue
            if job.known and job.outcome is not None and job.outcome.status.ended and self.life.rng.random() < 0.8:
                job.next = len(job.pieces)  # sometimes a chunk is registered all the same, late
                continue
            batch.append(job)
            if len(batch) == MAX_BATCH:
                break
        return batch

    async def _run(self, batch: list[PrefillRoomJob]) -> None:
        plan = batch[0].pieces[batch[0].next].plan
        pieces = [job.pieces[job.next] for job in batch]
        for job, piece in zip(batch, pieces, strict=True):
            job.running = True
            piece.attempt += 1
        specs = [piece.spec for piece in pieces]
        for _ in range(plan.formed - 1):
            self.face.begin_forward(specs)
        forward = self.face.begin_forward(specs)
        self.world.record(self.life.name, "begins a forward", [str(spec.key) for spec in specs], plan.end)
        for job in batch:
            self._now_known(job)
        fired = await self._fire_layers(forward, batch, pieces, plan)
        first = pieces[0].attempt == 1
        if plan.end == "never" and first:
            self._open.append(forward)
            skipped = MAX_CHUNKS
        elif plan.end in ("discard", "raise") and first:
            self._throw_away(forward, plan)
            # Once a group is closed its pages may be read: the room fails, and they are not rewritten.
            skipped = MAX_CHUNKS if fired else 0
        else:
            forward.end()
            skipped = 1
        for job in batch:
            job.running = False
            job.next += skipped
            self._release_if_free(job)

    async def _fire_layers(
        self, forward: ForwardPass, batch: list[PrefillRoomJob], pieces: list[Piece], plan: PassPlan
    ) -> bool:
        """Whether a group was closed."""
        whole = plan.end == "end" or pieces[0].attempt > 1  # the second time it runs to its end
        layers = sorted({buffer.layer for buffer in self.life.memory.buffers if buffer.unit == "page"})
        hooked = [layer for layer in layers if layer < LAYERS]
        for layer in hooked if whole else hooked[: plan.after]:
            self._launch(batch, pieces, {layer}, plan.layer_s)
            if layer not in plan.missing:
                forward.layer_end(layer)
            if plan.layer_s and self.life.rng.random() < 0.7:
                await asyncio.sleep(self.life.rng.random() * plan.layer_s)
        if whole:
            self._launch(batch, pieces, set(layers) - set(hooked), plan.layer_s)
            self._launch(batch, pieces, None, 0.0)
        return forward.events_recorded > 0

    def _launch(
        self, batch: list[PrefillRoomJob], pieces: list[Piece], layers: set[int] | None, seconds: float
    ) -> None:
        """Enqueue the kernel that writes these layers of every chunk of the batch; None: aux slots and state rows."""
        work: list[tuple[PrefillRoomJob, Item, int, int]] = []
        for job, piece in zip(batch, pieces, strict=True):
            job.kernels += 1
            if layers is not None:
                units: list[tuple[Unit, int]] = [(("page", page), position) for page, position in piece.pages]
            else:
                units = [(u, p) for u, p in job.grant.positions.items() if u[0] != "page" and piece.spec.last]
            work += [
                (job, item, position, piece.attempt)
                for unit, position in units
                for item in self.life.memory.items_of(*unit)
                if layers is None or item.buffer.layer in layers
            ]

        def kernel() -> None:
            for job, item, position, attempt in work:
                self.world.oracle.wrote(self.life.side, job.key, item, position, attempt)
            for job in batch:
                job.kernels -= 1
                self._release_if_free(job)

        self.life.device.launch(kernel, seconds)

    def _throw_away(self, forward: ForwardPass, plan: PassPlan) -> None:
        if plan.end == "discard":
            forward.discard()
            return
        try:
            with forward:
                raise ArithmeticError("the forward raised")
        except ArithmeticError:
            return

    # -- the end of a room -------------------------------------------------------------------------------------------

    def _now_known(self, job: PrefillRoomJob) -> None:
        if job.known:
            return
        job.known = True
        job.since = self.world.loop.time(), self.life.held_s
        self.world.rooms.add(job.plan.number)
        job.outcome = self.face._sender.rooms.find(job.key)
        job.outcome.future().add_done_callback(lambda future: self._ended(job, future.result()))
        self.face.on_source_free(job.key.room, job.key.gen, lambda: self._source_free(job))

    def _ended(self, job: PrefillRoomJob, outcome: Outcome) -> None:
        ok = outcome.status is RoomStatus.SUCCESS
        self.world.record(self.life.name, "ends room", outcome.key, outcome.status.name, outcome.error or "")
        self.world.counts["ok" if ok else "failed"] += 1
        self.world.oracle.ended(self.life.side, outcome.key, outcome.status.name)
        self.life.check_deadline(outcome.key, *job.since)
        first = next(other for other in self.jobs if other.key == job.key)
        if ok and not job.plan.fake and first is job:
            self.world.oracle.prefill_succeeded(self.life.side, outcome.key, len(job.plan.decodes))

    def _source_free(self, job: PrefillRoomJob) -> None:
        self.world.record(self.life.name, "hears that the source is free of room", job.key)
        job.source_free = True
        self._release_if_free(job)

    def _release_if_free(self, job: PrefillRoomJob) -> None:
        if not job.source_free or job.kernels or job.running or job.released:
            return
        job.released = True
        self.world.oracle.source_released(self.life.side, job.grant, POISON_TOKEN)
        self._pool.give_back(job.units)
        self._serve()

    # -- what the plan asks ------------------------------------------------------------------------------------------

    def abort(self, plan: RoomPlan, reason: str) -> None:
        """Also of rooms it never heard of."""
        self.world.counts["aborts"] += 1
        self.world.record(self.life.name, "aborts room", plan.key)
        self.face.abort(plan.room, plan.gen, reason)

    def stop_waiting(self) -> None:
        """Forget the requests that still wait for units."""
        self._waiting.clear()

    def abort_all(self) -> None:
        for job in list(self.jobs):
            if job.known and job.outcome is not None and not job.outcome.status.ended:
                self.abort(job.plan, "abort storm")

    # -- at the end --------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        rooms = self.face._sender.rooms
        return [
            f"{self.life.name}: room {job.key} is {job.outcome.status.name}: {rooms.live(job.key)!r}"
            for job in self.jobs
            if job.outcome is not None and not job.outcome.status.ended
        ]

    def remembered(self) -> list[str]:
        """Verdicts and outcomes whose time is over."""
        return remembered(self.life.name, self.face._sender.rooms)

    def left(self) -> list[str]:
        """What is in the books (V8), unless a block of ours never gets a verdict: what it pins stays pinned."""
        sender = self.face._sender
        if any(engine.pending for engine in self.life.engines) and self.world.workload.engine.stuck:
            return []
        lines = [repr(room) for room in sender.rooms]
        lines += [f"lane {lane.session} is busy" for lane in sender.sessions.lanes.values() if not lane.idle]
        lines += [f"{len(sender.pins)} pages are pinned"] if len(sender.pins) else []
        lines += [repr(link) for link in sender.reception.links.values() if link.rooms]
        lines += [f"task {task.get_name()}" for task in sender._tasks]
        lines += [f"the source of room {job.key} is not free" for job in self.jobs if job.known and not job.source_free]
        return [f"{self.life.name}: {line}" for line in lines]
