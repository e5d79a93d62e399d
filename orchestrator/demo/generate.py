"""Chunked prefill and greedy decoding by hand, with a hash of every forward's logits to compare runs by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.adapters.transformers import tensor_hash


def forwards(total_tokens: int, chunk_tokens: int, prefix_tokens: int) -> list[tuple[int, int]]:
    """The token ranges of a chunked prefill behind a cached prefix, one per forward."""
    starts = range(prefix_tokens, total_tokens, chunk_tokens)
    return [(start, min(start + chunk_tokens, total_tokens)) for start in starts]


def forward(model: Any, ids: Sequence[int], cache: Any) -> torch.Tensor:
    """Run the model over ``ids`` behind what the cache holds; the logits of the last position, ``[vocabulary]``.

    Positions and masks follow from the cache's length: nothing else may be passed (a wrong mask goes unnoticed).
    """
    out = model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def best(logits: torch.Tensor) -> int:
    """The greedy choice. NaN logits choose a token too, which is why tokens alone prove little."""
    return int(logits.argmax())


def greedy(model: Any, cache: Any, first_token: int, new_tokens: int) -> tuple[list[int], list[str]]:
    """Generate up to ``new_tokens`` tokens, the first one given. Returns them and each further step's logits hash."""
    tokens, hashes = [first_token], []
    while len(tokens) < new_tokens and tokens[-1] != model.config.eos_token_id:
        logits = forward(model, tokens[-1:], cache)
        hashes.append(tensor_hash(logits))
        tokens.append(best(logits))
    return tokens, hashes


def draft_bytes(seed: int, kind: str, position: int, nbytes: int) -> bytes:
    """What stands in one page of a draft buffer: random bytes that every process can compute by itself."""
    return hashlib.shake_128(f"{seed} {kind} {position}".encode()).digest(nbytes)
