"""The prefill worker: chunked forwards into its paged pool, each layer handed to kvferry by the cache's own hook."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from orchestrator import ChunkSpec, Config, EmbeddedLoop
from orchestrator.adapters.transformers import AUX_WORDS, PagedCache, tensor_hash
from orchestrator.demo import model as models
from orchestrator.demo import wire
from orchestrator.demo.generate import best, draft_bytes, forward, forwards
from orchestrator.demo.inject import faulty
from orchestrator.demo.pagebook import PageBook
from orchestrator.demo.side import AUX_SLOTS, LOCALHOST, make_layout, make_pool
from orchestrator.demo.single import warm_up
from orchestrator.demo.switched import SwitchedLink
from orchestrator.demo.worker import Talk
from orchestrator.engines.base import Engine
from orchestrator.engines.mooncake import MooncakeEngine
from orchestrator.forward import ForwardPass
from orchestrator.pages.ranges import ChunkCursor, Range

ROOM_SECONDS = 120.0


class _Hook:
    """What the cache calls when a layer is written: notes the time and tells the current forward pass, if any."""

    def __init__(self) -> None:
        self.written: list[tuple[int, float]] = []
        self.forward_pass: ForwardPass | None = None

    def __call__(self, layer: int) -> None:
        self.written.append((layer, time.monotonic()))
        if self.forward_pass is not None:
            self.forward_pass.layer_end(layer)


class Prefill:
    """Owns a pool, an engine and an embedded loop."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._loops = ExitStack()

    def handle(self, command: wire.AnyCommand) -> Any:
        match command:
            case wire.Open():
                return self._open(command)
            case wire.PrefillJob():
                with torch.inference_mode():
                    return self._run(command)
            case wire.Close():
                self._loops.close()
        return None

    def _open(self, command: wire.Open) -> wire.Opened:
        engine: Engine = MooncakeEngine(host=LOCALHOST)  # first: it fails at once where something is missing
        info = engine.info
        self._talk.note("loading the model")
        self._model = models.load(Path(command.cache))
        self._pool = make_pool(self._model, command)
        self._pages = PageBook(command.pages, seed=1)
        self._chunk_tokens = command.chunk_tokens
        layout = make_layout(self._pool, self._model)
        if command.inject:
            engine = faulty(engine, command.inject, layout.buffers)
        self._link = SwitchedLink(engine, command.link_gbps)
        loop = self._loops.enter_context(EmbeddedLoop(Config(layer_group=command.layer_group)))
        self._node = loop.start_prefill(self._link, layout, bind=f"tcp://{LOCALHOST}:{command.control_port}")
        if command.warm_up:
            warm_up(self._model, command.chunk_tokens)
        return wire.Opened(engine=info.name, completion_mode=info.completion_mode, address=self._node.address)

    def _run(self, job: wire.PrefillJob) -> wire.PrefillRun:
        size, total = self._pool.page_size, len(job.ids)
        pages = self._pages.begin(job.prompt, job.prefix_tokens // size, -(-total // size))
        self._link.paced = job.paced
        slot = job.gen % AUX_SLOTS
        hook = _Hook()
        cache = PagedCache(self._pool, pages, length=job.prefix_tokens, on_write=hook)
        cursor = ChunkCursor(size, job.prefix_tokens)
        times: list[tuple[float, float]] = []
        ranges = forwards(total, self._chunk_tokens, job.prefix_tokens)
        for number, (start, end) in enumerate(ranges, 1):
            self._talk.note(f"forward {number} of {len(ranges)}")
            final = cursor.advance(end, last=end == total)
            started = time.monotonic()
            with self._node.begin_forward([_chunk(job, final, pages, size, slot)] if final else []) as forward_pass:
                hook.forward_pass = forward_pass if job.mode == "layerwise" else None
                logits = forward(self._model, job.ids[start:end], cache)
                if final:
                    self._write_draft(job.prompt, pages, final)
                if end == total:
                    self._pool.aux[slot] = torch.tensor([best(logits)] + [0] * (AUX_WORDS - 1))
                times.append((started, time.monotonic()))
        result = self._node.wait(job.room, job.gen, ROOM_SECONDS)
        self._await_free(job)
        if result.error is not None:
            raise result.error
        digests = self._pool.digest(pages, total)
        self._pages.end(job.prompt, pages, job.keep_tokens // size)
        return wire.PrefillRun(
            gen=job.gen,
            first_token=int(self._pool.aux[slot, 0]),
            logits=tensor_hash(logits),
            pages=digests,
            forwards=times,
            bytes=result.bytes or 0,
            blocks=result.blocks or 0,
            chunks=result.chunks,
            layers_fired=result.layers_fired,
            layers_fallback=result.layers_fallback,
            written=hook.written,
            spans=list(result.spans),
            stamps=result.stamps,
        )

    def _write_draft(self, prompt: int, pages: list[int], final: Range) -> None:
        """The draft pages of a chunk, where a draft model's forward would write them."""
        first, count = final.positions(self._pool.page_size)
        self._pool.write_draft(pages[first : first + count], first, partial(draft_bytes, prompt))

    def _await_free(self, job: wire.PrefillJob) -> None:
        """The pages may be given to somebody else only when no batch reads them any more."""
        deadline = time.monotonic() + ROOM_SECONDS
        while not self._node.source_free(job.room, job.gen) and time.monotonic() < deadline:
            time.sleep(0.001)


def _chunk(job: wire.PrefillJob, final: Range, pages: list[int], page_size: int, slot: int) -> ChunkSpec:
    """What one forward makes final, as kvferry wants to know it."""
    first, count = final.positions(page_size)
    return ChunkSpec(
        room=job.room,
        gen=job.gen,
        start_token=final.start_token,
        end_token=final.end_token,
        pages=pages[first : first + count],
        last=final.last,
        aux_slot=slot if final.last else None,
    )
