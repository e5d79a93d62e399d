"""The decode worker: leases pages to rooms, verifies what was committed, and reuses pages as soon as they are free."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator import Config, EmbeddedLoop, RoomHandle
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from orchestrator.testing.pool import Pool
from scripts.soaking import tables
from scripts.soaking.content import Content
from scripts.soaking.units import FreeUnits


@dataclass(slots=True)
class Room:
    handle: RoomHandle
    pages: list[int]
    first: int
    slot: int | None
    free: asyncio.Event


class Decoding:
    """Its coroutines are the commands; they run on the main thread's loop, kvferry's own loop is another thread."""

    def __init__(
        self,
        pool: dict[str, Any],
        config: dict[str, Any],
        completion: CompletionMode = "auto",
        rollover: bool = True,
    ) -> None:
        self._pool = Pool(**pool)
        self._content = Content(self._pool)
        self._config = Config(**config)
        self._completion: CompletionMode = completion
        self._rollover = rollover
        self._units = FreeUnits(self._pool.layout.num_pages)
        self._slots = FreeUnits(self._pool.layout.units_of("aux"))
        self._rooms: dict[tuple[int, int], Room] = {}
        self._verified = 0
        self._strays: list[str] = []

    async def start(self) -> dict[str, Any]:
        self._main = asyncio.get_running_loop()
        engine = MooncakeEngine(completion=self._completion)
        self._loop = EmbeddedLoop(self._config)
        self._loop.__enter__()
        renew = (lambda: MooncakeEngine(completion=self._completion)) if self._rollover else None
        self._decode = self._loop.start_decode(engine, self._pool.layout, renew=renew)
        return {"session": engine.session, "pid": os.getpid()}

    # -- one room, from its pages to their next owner ------------------------------------------------------------

    async def room(
        self, room: int, gen: int, peers: list[str], tokens: int, abort_after: float | None, late: float
    ) -> dict[str, Any]:
        """Expect it ``late`` seconds from now, end it ``abort_after`` seconds after that, verify it, free its pages."""
        loop = asyncio.get_running_loop()
        if late:
            await asyncio.sleep(late)
        mine = await self._expect(room, gen, peers, tokens)
        began = loop.time()
        aborting = None
        aborted: list[bool] = []
        if abort_after is not None:
            aborting = loop.call_later(abort_after, lambda: aborted.append(mine.handle.abort("the client went away")))
        result = await mine.handle
        ended = loop.time()
        wrong = self._content.differences(room, gen, mine.pages, mine.first, mine.slot) if result.ok else []
        self._verified += len(mine.pages) if result.ok else 0
        await mine.free.wait()
        freed = loop.time()
        if aborting is not None and not aborted:
            aborting.cancel()
        del self._rooms[room, gen]
        self._recycle(mine)
        return {
            "ok": result.ok,
            "error": str(result.error or ""),
            "wrong": wrong,
            "aborted": any(aborted),
            "seconds": ended - began,
            "freed_after": freed - ended,
            "bytes": result.bytes if result.ok else 0,
        }

    async def _expect(
        self,
        room: int,
        gen: int,
        peers: list[str],
        tokens: int,
        pages: list[int] | None = None,
        prefix_tokens: int = 0,
    ) -> Room:
        size = self._pool.page_size
        first = prefix_tokens // size
        if pages is None:
            pages = await self._units.take(-(-tokens // size) - first)
        slot = (await self._slots.take(1))[0] if self._slots.total else None
        self._check_poison(pages)
        handle = self._decode.expect(
            room, gen, peers, pages, total_tokens=tokens, prefix_tokens=prefix_tokens, aux_slot=slot
        )
        mine = self._rooms[room, gen] = Room(handle, pages, first, slot, asyncio.Event())
        handle.on_units_free(partial(self._free, mine))
        return mine

    def _free(self, mine: Room) -> None:
        """kvferry's loop thread."""
        self._main.call_soon_threadsafe(mine.free.set)

    def _recycle(self, mine: Room) -> None:
        self._content.poison(mine.pages, mine.slot)
        self._units.give(mine.pages)
        if mine.slot is not None:
            self._slots.give([mine.slot])

    def _check_poison(self, pages: list[int]) -> None:
        """A page that was free must be as its last owner left it."""
        self._strays += [f"page {page} was written while it was free" for page in self._content.strays(pages)]

    # -- step by step, for tests ---------------------------------------------------------------------------------

    async def expect(
        self, room: int, gen: int, peers: list[str], tokens: int, pages: list[int] | None = None, prefix_tokens: int = 0
    ) -> list[int]:
        """Expect a room and return its pages; they stay its own until `recycle`."""
        return (await self._expect(room, gen, peers, tokens, pages, prefix_tokens)).pages

    async def ended(self, room: int, gen: int) -> dict[str, Any]:
        """Wait for the outcome."""
        result = await self._rooms[room, gen].handle
        return {"ok": result.ok, "error": str(result.error or "")}

    async def abort(self, room: int, gen: int) -> bool:
        return self._rooms[room, gen].handle.abort("the test says so")

    async def free(self, room: int, gen: int) -> bool:
        """Whether the units are free now."""
        return self._rooms[room, gen].handle.units_free()

    async def freed(self, room: int, gen: int) -> None:
        """Wait until they are."""
        await self._rooms[room, gen].free.wait()

    async def wrong(self, room: int, gen: int, as_room: int | None = None, as_gen: int | None = None) -> list[str]:
        """What its pages and slot do not hold of the room's content (or of another's)."""
        mine = self._rooms[room, gen]
        return self._content.differences(
            room if as_room is None else as_room, gen if as_gen is None else as_gen, mine.pages, mine.first, mine.slot
        )

    async def poisoned(self, room: int, gen: int) -> int:
        """How many of its pages nobody has written into."""
        pages = self._rooms[room, gen].pages
        return len(pages) - len(self._content.strays(pages))

    async def poison(self, room: int, gen: int) -> None:
        """Overwrite its pages with poison, whoever may still write there."""
        mine = self._rooms[room, gen]
        self._content.poison(mine.pages, mine.slot)

    async def recycle(self, room: int, gen: int) -> None:
        """Give its pages to the next room that asks."""
        self._recycle(self._rooms.pop((room, gen)))

    async def roll_over(self) -> None:
        self._decode.roll_over()

    # -- what a coordinator asks ---------------------------------------------------------------------------------

    async def tables(self) -> dict[str, Any]:
        return self._loop.call(tables.of_decode) | {"open": len(self._rooms), "process": tables.of_process()}

    async def audit(self) -> dict[str, Any]:
        """What was verified, and every stray write seen, those into pages that are free now included."""
        free = self._units.free
        self._check_poison(free)
        return {"verified": self._verified, "strays": self._strays, "free": len(free), "pages": self._units.total}

    async def close(self) -> None:
        """The orderly end."""
        await asyncio.to_thread(self._loop.close)
