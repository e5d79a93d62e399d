"""A paged pool in host memory: every page has content of its own and can be compared byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from protocols.blocks import Ints
from protocols.layout import CpMode, LayerBuffer, Layout

Bytes = npt.NDArray[np.uint8]
POISON = 0xEE


class Pool:
    """``layers`` hooked layers, ``drafts`` hook-less ones after them, one aux, one state and one scratch buffer."""

    def __init__(
        self,
        *,
        pages: int = 64,
        layers: int = 4,
        drafts: int = 1,
        page_size: int = 4,
        item_len: int = 64,
        kind: Literal["mha", "mla"] = "mha",
        aux_slots: int = 8,
        aux_len: int = 32,
        state_rows: int = 0,
        own_layers: Sequence[int] | None = None,
        with_aux: bool = True,
        seed: int | None = None,
        **ranks: Any,
    ) -> None:
        """``own_layers`` restricts a pipeline stage to its slice; ``seed`` fills with content, None with poison."""
        kinds = ("k", "v") if kind == "mha" else ("mla",)
        owned = range(layers + drafts) if own_layers is None else own_layers
        self.arrays: dict[tuple[str, int], Bytes] = {}
        for layer in owned:
            for name in kinds:
                self.arrays[(name if layer < layers else f"draft_{name}", layer)] = np.empty(
                    (pages, item_len), np.uint8
                )
        if with_aux and aux_slots:
            self.arrays[("aux", 0)] = np.empty((aux_slots, aux_len), np.uint8)
        if state_rows:
            self.arrays[("state", 0)] = np.empty((state_rows, 16), np.uint8)
        self.arrays[("scratch", 0)] = np.zeros((1, 64), np.uint8)
        rng = np.random.default_rng(seed)
        for array in self.arrays.values():
            array[...] = POISON if seed is None else rng.integers(0, 256, array.shape, np.uint8)
        self.layers = layers
        self.page_size = page_size
        self.layout = Layout(
            page_size=page_size,
            dtype="uint8",
            contract="kvferry-testing",
            num_layers=layers + drafts,
            kv_heads=0 if kind == "mla" else 1,
            head_dim=item_len // page_size,
            buffers=tuple(
                LayerBuffer(
                    id=number,
                    kind=name,
                    layer=layer,
                    address=array.ctypes.data,
                    nbytes=array.nbytes,
                    item_len=array.shape[1],
                    hooked=not name.startswith("draft_"),
                )
                for number, ((name, layer), array) in enumerate(self.arrays.items())
            ),
            **ranks,
        )

    def differences(self, other: Pool, pages: Ints, other_pages: Ints) -> list[str]:
        """The (buffer, page) pairs of ours that ``other`` does not hold byte for byte at ``other_pages``."""
        return [
            f"{name}[{layer}] page {page} != {twin}"
            for (name, layer), array in self.arrays.items()
            if name not in ("aux", "state", "scratch")
            for page, twin in zip(pages.tolist(), other_pages.tolist(), strict=True)
            if not np.array_equal(array[page], other.arrays[(name, layer)][twin])
        ]

    def untouched(self, pages: Ints) -> bool:
        """Every byte outside these pages is still poison."""
        return all(
            bool((np.delete(array, pages, axis=0) == POISON).all())
            for (name, _), array in self.arrays.items()
            if name not in ("aux", "state", "scratch")
        )

    def poison(self) -> None:
        for array in self.arrays.values():
            array[...] = POISON


__all__ = ["POISON", "CpMode", "Pool"]
