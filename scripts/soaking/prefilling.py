"""The prefill worker: writes each room's content layer by layer, and reuses its pages as soon as the source is free."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator import Config, EmbeddedLoop
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from orchestrator.testing.pool import Pool
from scripts.soaking import tables
from scripts.soaking.content import Content
from scripts.soaking.forwards import Forwards, Job
from scripts.soaking.units import FreeUnits


@dataclass(slots=True)
class Room:
    known: asyncio.Event
    """kvferry has heard of it."""
    idle: asyncio.Event
    """No forward writes its pages."""
    free: asyncio.Event
    """No transfer reads them."""
    job: Job = field(init=False)


class Prefilling:
    """Its coroutines are the commands; they run on the main thread's loop, kvferry's own loop is another thread."""

    def __init__(
        self,
        pool: dict[str, Any],
        config: dict[str, Any],
        completion: CompletionMode = "auto",
        bind: str = "tcp://127.0.0.1:0",
    ) -> None:
        self._pool = Pool(**pool)
        self._content = Content(self._pool)
        self._config = Config(**config)
        self._completion: CompletionMode = completion
        self._bind = bind
        self._units = FreeUnits(self._pool.layout.num_pages)
        self._slots = FreeUnits(self._pool.layout.units_of("aux"))
        self._rooms: dict[tuple[int, int], Room] = {}

    async def start(self) -> dict[str, Any]:
        self._main = asyncio.get_running_loop()
        engine = MooncakeEngine(completion=self._completion)
        self._loop = EmbeddedLoop(self._config)
        self._loop.__enter__()
        self._prefill = self._loop.start_prefill(engine, self._pool.layout, self._bind)
        self._forwards = Forwards(self._prefill, self._content)
        info = engine.info
        return {
            "address": self._prefill.address,
            "session": engine.session,
            "pid": os.getpid(),
            "engine": f"{info.name} {info.version} {info.completion_mode}",
        }

    # -- one room, from its pages to their next owner ------------------------------------------------------------

    async def room(
        self, room: int, gen: int, chunks: list[tuple[int, int]], abort_at: tuple[int, int] | None, late: float
    ) -> dict[str, Any]:
        """Run its forwards ``late`` seconds from now; end it at (chunk, layer) if so told; reuse its pages."""
        loop = asyncio.get_running_loop()
        if late:
            await asyncio.sleep(late)
        began = loop.time()
        await self.send(room, gen, chunks, abort_at=abort_at)
        result = await self._prefill.finished(room, gen)
        ended = loop.time()
        await self.freed(room, gen)
        freed = loop.time()
        aborted = self._rooms[room, gen].job.aborted  # the forward thread says so when its pass is over
        await self.recycle(room, gen)
        return {
            "ok": result.ok,
            "error": str(result.error or ""),
            "aborted": aborted,
            "seconds": ended - began,
            "freed_after": freed - ended,
        }

    # -- step by step, for tests ---------------------------------------------------------------------------------

    async def send(
        self,
        room: int,
        gen: int,
        chunks: list[tuple[int, int]],
        abort_at: tuple[int, int] | None = None,
        hold_after: int | None = None,
    ) -> list[int]:
        """Begin a room's forwards and return its pages; they stay its own until `recycle`."""
        pages = await self._units.take(-(-chunks[-1][1] // self._pool.page_size))
        slot = (await self._slots.take(1))[0] if self._slots.total else None
        mine = Room(asyncio.Event(), asyncio.Event(), asyncio.Event())
        mine.job = Job(
            room=room,
            gen=gen,
            pages=pages,
            chunks=[(start, end) for start, end in chunks],
            slot=slot,
            on_known=lambda: self._known(mine),
            on_idle=lambda: self._main.call_soon_threadsafe(mine.idle.set),
            abort_at=None if abort_at is None else (abort_at[0], abort_at[1]),
            hold_after=hold_after,
        )
        self._rooms[room, gen] = mine
        self._forwards.submit(mine.job)
        await mine.known.wait()
        return pages

    def _known(self, mine: Room) -> None:
        """Forward thread: kvferry has heard of the room."""
        self._prefill.on_source_free(mine.job.room, mine.job.gen, partial(self._free, mine))
        self._main.call_soon_threadsafe(mine.known.set)

    def _free(self, mine: Room) -> None:
        """kvferry's loop thread, or the forward thread where nothing was ever read."""
        self._main.call_soon_threadsafe(mine.free.set)

    async def go(self, room: int, gen: int) -> None:
        """Let a held forward go on."""
        self._rooms[room, gen].job.go.set()

    async def written(self, room: int, gen: int) -> None:
        """Wait until no forward writes its pages any more."""
        await self._rooms[room, gen].idle.wait()

    async def ended(self, room: int, gen: int) -> dict[str, Any]:
        """Wait for the outcome."""
        result = await self._prefill.finished(room, gen)
        return {"ok": result.ok, "error": str(result.error or "")}

    async def abort(self, room: int, gen: int) -> bool:
        return self._prefill.abort(room, gen, "the test says so")

    async def freed(self, room: int, gen: int) -> None:
        """Wait until nothing writes or reads the room's pages."""
        mine = self._rooms[room, gen]
        await mine.free.wait()
        await mine.idle.wait()

    async def recycle(self, room: int, gen: int) -> None:
        """Overwrite its pages and give them to the next room that asks."""
        job = self._rooms.pop((room, gen)).job
        self._content.poison(job.pages, job.slot)
        self._units.give(job.pages)
        if job.slot is not None:
            self._slots.give([job.slot])

    # -- what a coordinator asks ---------------------------------------------------------------------------------

    async def tables(self) -> dict[str, Any]:
        return self._loop.call(tables.of_prefill) | {"open": len(self._rooms), "process": tables.of_process()}

    async def close(self) -> None:
        """The orderly end."""
        await asyncio.to_thread(self._loop.close)
