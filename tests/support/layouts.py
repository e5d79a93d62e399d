"""Layouts to test with: a plain one, and the ranks of a model split in some way."""

from __future__ import annotations

from typing import Any

from protocols.layout import LayerBuffer, Layout

PAGE_SIZE = 16
PAGES = 32
SPACING = 1 << 24


def buffer(id: int, kind: str, layer: int, *, item_len: int = 512, items: int = PAGES, **more: Any) -> LayerBuffer:
    return LayerBuffer(
        id=id, kind=kind, layer=layer, address=(id + 1) * SPACING, nbytes=item_len * items, item_len=item_len, **more
    )


def mha_buffers(layers: range = range(4), *, item_len: int = 512) -> tuple[LayerBuffer, ...]:
    """K and V of each layer, then one aux buffer."""
    paged = [
        buffer(2 * layer + nth, kind, layer, item_len=item_len) for layer in layers for nth, kind in enumerate("kv")
    ]
    return (*paged, buffer(1000, "aux", 0, item_len=64, items=8))


def mla_buffers(layers: range = range(4), *, item_len: int = 512) -> tuple[LayerBuffer, ...]:
    return tuple(buffer(layer, "mla", layer, item_len=item_len) for layer in layers)


def make_layout(**changes: Any) -> Layout:
    """MHA, 4 layers, one rank; ``changes`` are fields of Layout."""
    fields: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "dtype": "bfloat16",
        "contract": "engine 1",
        "num_layers": 4,
        "buffers": mha_buffers(),
        "kv_heads": 2,
        "head_dim": 8,
    }
    return Layout(**fields | changes)


def make_mla_layout(**changes: Any) -> Layout:
    return make_layout(**{"buffers": mla_buffers(), "kv_heads": 0, "head_dim": 0} | changes)
