"""The prefill worker: chunked forwards into its paged pool, each layer handed to kvferry by the cache's own hook."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from orchestrator import ChunkSpec, Config, EmbeddedLoop
from orchestrator.adapters.transformers import PagedCache, tensor_hash
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
from orchestrator.pages.ranges import ChunkCursor
from orchestrator.trace import TransferResult

ROOM_SECONDS = 120.0


class Prefill:
    """Owns a pool, an engine and an embedded loop."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def handle(self, command: wire.AnyCommand) -> Any:
        match command:
            case wire.Open():
                return self._open(command)
            case wire.PrefillJob():
                with torch.inference_mode():
                    return self._run(command)
            case wire.Close():
                self._loop.close()
        return None

    def _open(self, command: wire.Open) -> wire.Opened:
        self._talk.note("loading the model")
        self._model = models.load(Path(command.cache))
        self._pool = make_pool(self._model, command)
        self._pages = PageBook(command.pages, seed=1)
        self._chunk_tokens = command.chunk_tokens
        layout = make_layout(self._pool, self._model)
        engine: Engine = MooncakeEngine(host=LOCALHOST)
        info = engine.info
        if command.inject:
            engine = faulty(engine, command.inject, layout.buffers)
        self._link = SwitchedLink(engine, command.link_gbps)
        self._loop = EmbeddedLoop(Config(layer_group=command.layer_group))
        self._loop.start()
        self._node = self._loop.start_prefill(self._link, layout, bind=f"tcp://{LOCALHOST}:{command.control_port}")
        warm_up(self._model, command.chunk_tokens)
        return wire.Opened(engine=info.name, completion_mode=info.completion_mode, address=self._node.address)

    def _run(self, job: wire.PrefillJob) -> wire.PrefillRun:
        size, total = self._pool.page_size, len(job.ids)
        pages = self._pages.begin(job.prompt, job.prefix_tokens // size, -(-total // size))
        self._link.paced = job.paced
        slot = job.gen % AUX_SLOTS
        cache = PagedCache(self._pool, pages, length=job.prefix_tokens, on_write=self._on_write)
        cursor = ChunkCursor(size, job.prefix_tokens)
        written: list[tuple[int, float]] = []
        times: list[tuple[float, float]] = []
        ranges = forwards(total, self._chunk_tokens, job.prefix_tokens)
        for number, (start, end) in enumerate(ranges, 1):
            self._talk.note(f"prefill {number}/{len(ranges)}")
            last = end == total
            made = cursor.advance(end, last)
            chunks: list[ChunkSpec] = []
            if made is not None:
                first_page, count = made.positions(size)
                final = pages[first_page : first_page + count]
                chunks.append(
                    ChunkSpec(
                        room=job.room,
                        gen=job.gen,
                        start_token=made.start_token,
                        end_token=made.end_token,
                        pages=final,
                        last=last,
                        aux_slot=slot if last else None,
                    )
                )
            started = time.monotonic()
            with self._node.begin_forward(chunks) as forward_pass:
                hook = forward_pass.layer_end if job.mode == "layerwise" else None

                def on_write(layer: int, hook: Any = hook) -> None:
                    written.append((layer, time.monotonic()))
                    if hook is not None:
                        hook(layer)

                self._hook = on_write
                logits = forward(self._model, job.ids[start:end], cache)
                if made is not None:
                    self._pool.write_draft(final, first_page, lambda *page: draft_bytes(job.prompt, *page))
                if last:
                    self._pool.aux[slot] = 0
                    self._pool.aux[slot, 0] = best(logits)
                times.append((started, time.monotonic()))
        result = self._node.wait(job.room, job.gen, ROOM_SECONDS)
        self._await_free(job)
        if result.error is not None:
            raise result.error
        run = self._report(job, result, pages, written, times, tensor_hash(logits), slot)
        self._pages.end(job.prompt, pages, job.keep_tokens // size)
        return run

    def _on_write(self, layer: int) -> None:
        self._hook(layer)

    def _await_free(self, job: wire.PrefillJob) -> None:
        """The pages may be given to somebody else only when no batch reads them any more."""
        deadline = time.monotonic() + ROOM_SECONDS
        while not self._node.source_free(job.room, job.gen) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _report(
        self,
        job: wire.PrefillJob,
        result: TransferResult,
        pages: list[int],
        written: list[tuple[int, float]],
        times: list[tuple[float, float]],
        logits: str,
        slot: int,
    ) -> wire.PrefillRun:
        return wire.PrefillRun(
            gen=job.gen,
            first_token=int(self._pool.aux[slot, 0]),
            logits=logits,
            pages=self._pool.digest(pages, len(job.ids)),
            forwards=times,
            bytes=result.bytes or 0,
            blocks=result.blocks or 0,
            chunks=result.chunks,
            layers_fired=result.layers_fired,
            layers_fallback=result.layers_fallback,
            written=written,
            spans=list(result.spans),
            stamps=result.stamps,
        )
