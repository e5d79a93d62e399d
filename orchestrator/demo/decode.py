"""The decode worker: receives a prompt's pages and generates from nothing else. It never sees the prompt."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from orchestrator import Config, EmbeddedLoop
from orchestrator.adapters.transformers import PagedCache
from orchestrator.demo import model as models
from orchestrator.demo import wire
from orchestrator.demo.generate import greedy
from orchestrator.demo.pagebook import PageBook
from orchestrator.demo.side import AUX_SLOTS, LOCALHOST, make_layout, make_pool
from orchestrator.demo.single import warm_up
from orchestrator.demo.worker import Talk
from orchestrator.engines.mooncake import MooncakeEngine

CONNECT_SECONDS = 5.0
ROOM_SECONDS = 120.0


class Decode:
    """Owns a pool, an engine and an embedded loop."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._loops = ExitStack()

    def handle(self, command: wire.AnyCommand) -> Any:
        match command:
            case wire.Open():
                return self._open(command)
            case wire.Connect():
                self._address = command.address
                self._node.check(command.address, CONNECT_SECONDS + 1.0)
            case wire.DecodeJob():
                with torch.inference_mode():
                    return self._run(command)
            case wire.Close():
                self._loops.close()
        return None

    def _open(self, command: wire.Open) -> wire.Opened:
        engine = MooncakeEngine(host=LOCALHOST)
        self._talk.note("loading the model")
        self._model = models.load(Path(command.cache))
        self._pool = make_pool(self._model, command)
        self._pages = PageBook(command.pages, seed=2)
        loop = self._loops.enter_context(EmbeddedLoop(Config(connect_timeout_s=CONNECT_SECONDS)))
        self._node = loop.start_decode(engine, make_layout(self._pool, self._model))
        if command.warm_up:
            warm_up(self._model, 1)
        return wire.Opened(engine=engine.info.name, completion_mode=engine.info.completion_mode)

    def _run(self, job: wire.DecodeJob) -> wire.DecodeRun:
        size, prefix_pages = self._pool.page_size, job.prefix_tokens // self._pool.page_size
        pages = self._pages.begin(job.prompt, prefix_pages, -(-(job.total_tokens + job.new_tokens) // size))
        received = pages[: -(-job.total_tokens // size)]
        slot = job.gen % AUX_SLOTS
        self._pool.poison(pages[prefix_pages:], [slot])
        handle = self._node.expect(
            job.room,
            job.gen,
            [self._address],
            received[prefix_pages:],
            total_tokens=job.total_tokens,
            prefix_tokens=job.prefix_tokens,
            aux_slot=slot,
        )
        self._talk.note(wire.EXPECTING)
        result = handle.wait(ROOM_SECONDS)
        committed = time.monotonic()
        if result.error is not None:
            raise result.error
        first_token = int(self._pool.aux[slot, 0])
        first_token_at = time.monotonic()
        digests = self._pool.digest(received, job.total_tokens)
        self._talk.note("generating")
        cache = PagedCache(self._pool, pages, length=job.total_tokens)
        tokens, hashes = greedy(self._model, cache, first_token, job.new_tokens)
        assert handle.units_free(), "a committed room's pages are the worker's own again"
        self._pages.end(job.prompt, pages, job.keep_tokens // size)
        return wire.DecodeRun(
            tokens=tokens,
            logits=hashes,
            pages=digests,
            committed=committed,
            first_token_at=first_token_at,
            stamps=result.stamps,
        )
