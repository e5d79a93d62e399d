"""The prefill worker's forward thread: one pass after the other, each over chunks of several rooms."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator import ChunkSpec, Prefill
from protocols.errors import UnknownRoomError
from scripts.soaking.content import Content

BATCH = 4
"""Most chunks in one pass."""


@dataclass(slots=True)
class Job:
    """One room's prompt: its pages and its chunks, as token ranges."""

    room: int
    gen: int
    pages: list[int]
    chunks: list[tuple[int, int]]
    slot: int | None
    on_known: Callable[[], object]
    """Called on the forward thread when kvferry has heard of the room."""
    on_idle: Callable[[], object]
    """Called on the forward thread when no forward writes the pages any more."""
    abort_at: tuple[int, int] | None = None
    """(chunk, layer): the prefill ends the room there, from the forward thread."""
    hold_after: int | None = None
    """The first chunk's forward waits after so many layers until ``go`` is set."""
    go: threading.Event = field(default_factory=threading.Event)
    next: int = 0
    aborted: bool = False


class Forwards:
    """``submit`` from any thread. The thread ends with the process."""

    def __init__(self, prefill: Prefill, content: Content) -> None:
        self._prefill = prefill
        self._content = content
        self._size = content.pool.page_size
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="forward", daemon=True).start()

    def submit(self, job: Job) -> None:
        """A job that holds has a thread of its own: it must not hold the others."""
        if job.hold_after is None:
            self._jobs.put(job)
        else:
            threading.Thread(target=self._alone, args=(job,), name="held forward", daemon=True).start()

    def _alone(self, job: Job) -> None:
        while job.next < len(job.chunks) and not self._over(job):
            self._forward([job])
        job.on_idle()

    def _run(self) -> None:
        while True:
            batch = [self._jobs.get()]
            while len(batch) < BATCH and not self._jobs.empty():
                batch.append(self._jobs.get())
            live = [job for job in batch if not self._over(job)]
            if live:
                self._forward(live)
            for job in batch:
                if job.next < len(job.chunks) and not self._over(job):
                    self._jobs.put(job)
                else:
                    job.on_idle()

    def _over(self, job: Job) -> bool:
        """The room has ended: no forward is run for it any more."""
        try:
            return job.aborted or (job.next > 0 and self._prefill.poll(job.room, job.gen).ended)
        except UnknownRoomError:
            return True

    def _forward(self, jobs: list[Job]) -> None:
        specs = [self._spec(job) for job in jobs]
        with self._prefill.begin_forward(specs) as forward:
            for job in jobs:
                if job.next == 0:
                    job.on_known()
            for layer in range(self._content.pool.layers):
                for job in jobs:
                    if job.hold_after == layer and job.next == 0:
                        job.go.wait()
                    start, end = self._span(job)
                    self._content.write_layer(layer, job.room, job.gen, job.pages[start:end], start)
                    if job.abort_at == (job.next, layer):
                        job.aborted = self._prefill.abort(job.room, job.gen, "the prefill's client went away")
                forward.layer_end(layer)
            for job in jobs:
                start, end = self._span(job)
                self._content.write_drafts(job.room, job.gen, job.pages[start:end], start)
                if job.next == len(job.chunks) - 1 and job.slot is not None:
                    self._content.write_aux(job.room, job.gen, job.slot)
        for job in jobs:
            job.next += 1

    def _span(self, job: Job) -> tuple[int, int]:
        """The positions of the next chunk: ``pages[i]`` holds position ``i``."""
        start, end = job.chunks[job.next]
        return start // self._size, -(-end // self._size)

    def _spec(self, job: Job) -> ChunkSpec:
        start, end = job.chunks[job.next]
        first, last = self._span(job)
        final = job.next == len(job.chunks) - 1
        return ChunkSpec(
            room=job.room,
            gen=job.gen,
            start_token=start,
            end_token=end,
            pages=job.pages[first:last],
            last=final,
            aux_slot=job.slot if final else None,
        )
