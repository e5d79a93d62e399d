"""The reference: prefill and generation in one process, with the stock cache and none of kvferry's code on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from orchestrator.adapters.transformers import page_hashes, probe, tensor_hash
from orchestrator.demo import model as models
from orchestrator.demo import wire
from orchestrator.demo.generate import best, draft_bytes, forward, forwards, greedy
from orchestrator.demo.worker import Talk


class Single:
    """Also owns the tokenizer. Keeps the cache of a prompt that will run again behind a prefix."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._kept: dict[int, DynamicCache] = {}

    def handle(self, command: wire.AnyCommand) -> Any:
        match command:
            case wire.Open():
                return self._open(command)
            case wire.Tokenize():
                return [self._tokenize(text) for text in command.texts]
            case wire.Detokenize():
                return [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in command.tokens]
            case wire.SingleJob():
                with torch.inference_mode():
                    return self._run(command)
        return None

    def _open(self, command: wire.Open) -> wire.Opened:
        self._talk.note("loading the model")
        self._tokenizer = models.load_tokenizer(Path(command.cache))
        self._model = models.load(Path(command.cache))
        self._chunk_tokens = command.chunk_tokens
        self._page_size = command.page_size
        self._draft = probe(self._model).layers[-1]
        if command.warm_up:
            warm_up(self._model, command.chunk_tokens)
        return wire.Opened()

    def _tokenize(self, text: str) -> list[int]:
        turns = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        return [int(token) for token in ids]

    def _run(self, job: wire.SingleJob) -> wire.SingleRun:
        cache = self._kept.pop(job.prompt, None) if job.prefix_tokens else None
        cache = cache or DynamicCache()
        cache.crop(job.prefix_tokens - cache.get_seq_length())
        started = time.monotonic()
        for start, end in forwards(len(job.ids), self._chunk_tokens, job.prefix_tokens):
            logits = forward(self._model, job.ids[start:end], cache)
        first = best(logits)
        forward_s = time.monotonic() - started
        pages = self._digest(cache, job)
        tokens, hashes = greedy(self._model, cache, first, job.new_tokens)
        if job.keep_tokens:
            self._kept[job.prompt] = cache
        return wire.SingleRun(tokens=tokens, logits=[tensor_hash(logits), *hashes], pages=pages, forward_s=forward_s)

    def _digest(self, cache: DynamicCache, job: wire.SingleJob) -> wire.Digests:
        """As ``PagedPool.digest``; the last entry of each list (the whole last page) says nothing here."""
        size, tokens = self._page_size, len(job.ids)

        def hashes(states: torch.Tensor) -> list[str]:
            rows = states[0].transpose(0, 1)
            return page_hashes((rows[at : at + size] for at in range(0, tokens, size)), size, tokens)

        def draft(kind: str, heads: int, dim: int) -> Iterator[torch.Tensor]:
            for position in range(-(-tokens // size)):
                data = bytearray(draft_bytes(job.prompt, kind, position, size * heads * dim * 4))
                yield torch.frombuffer(data, dtype=torch.float32).view(size, heads, dim)

        digests: wire.Digests = {}
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            digests[f"k[{index}]"], digests[f"v[{index}]"] = hashes(layer.keys), hashes(layer.values)
        index = len(layers)
        digests[f"draft_k[{index}]"] = page_hashes(draft("draft_k", *self._draft.k), size, tokens)
        digests[f"draft_v[{index}]"] = page_hashes(draft("draft_v", *self._draft.v), size, tokens)
        return digests


def warm_up(model: Any, chunk_tokens: int) -> None:
    """One forward of each kind that will be timed: the first ones of a process are slow."""
    with torch.inference_mode():
        cache = DynamicCache()
        forward(model, [1] * min(chunk_tokens, 256), cache)
        forward(model, [1], cache)
