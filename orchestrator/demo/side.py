"""What prefill and decode have in common: the shape of the pool, and how it is described to the other side."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from orchestrator.adapters.transformers import PagedPool, probe
from orchestrator.demo import wire
from protocols.layout import Layout

AUX_SLOTS = 8
LOCALHOST = "127.0.0.1"


def make_pool(model: Any, command: wire.Open) -> PagedPool:
    """A poisoned pool for this model, of the size the driver asked for."""
    return PagedPool(probe(model), pages=command.pages, page_size=command.page_size, aux_slots=AUX_SLOTS)


def make_layout(pool: PagedPool, model: Any) -> Layout:
    """The pool as a kvferry layout. Its contract names the code that reads and writes the KV; both must agree."""
    heads, dim = pool.shape.layers[0].k
    return Layout(
        page_size=pool.page_size,
        dtype=str(pool.shape.dtype).removeprefix("torch."),
        contract=f"transformers-{metadata.version('transformers')}",
        num_layers=int(model.config.num_hidden_layers),
        kv_heads=heads,
        head_dim=dim,
        buffers=pool.describe(),
    )
