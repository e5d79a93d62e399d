"""Bytes that say where they belong: what a page holds follows from room, generation, position and buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.testing.pool import POISON, Pool

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_MASK = (1 << 64) - 1
OTHERS = ("aux", "state", "scratch")
"""Kinds that are no pages."""


def expected(room: int, gen: int, buffer: int, positions: Sequence[int], item_len: int) -> Bytes:
    """The bytes of these positions in one buffer, a row each. ``item_len`` is a multiple of eight."""
    base = (room * 0xD6E8FEB86659FD93 + gen * 0xA0761D6478BD642F + (buffer + 1) * 0xE7037ED1A0B428DB) & _MASK
    with np.errstate(over="ignore"):
        seeds = np.uint64(base) + np.asarray(positions, np.uint64) * np.uint64(0x8EBC6AF09C88C6E3)
        words: Words = seeds[:, None] + np.arange(1, item_len // 8 + 1, dtype=np.uint64) * _STEP
        words ^= words >> np.uint64(31)
        words *= _MIX
        words ^= words >> np.uint64(29)
    return words.view(np.uint8)


class Content:
    """Writes and compares the pages of one pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._layers: dict[int, list[tuple[int, Bytes]]] = {}
        self._drafts: list[tuple[int, Bytes]] = []
        self._pages: list[tuple[int, Bytes]] = []
        for number, ((kind, layer), array) in enumerate(pool.arrays.items()):
            if kind in OTHERS:
                continue
            self._pages.append((number, array))
            if kind.startswith("draft_"):
                self._drafts.append((number, array))
            else:
                self._layers.setdefault(layer, []).append((number, array))
        self._aux = pool.arrays.get(("aux", 0))

    def write_layer(self, layer: int, room: int, gen: int, pages: Sequence[int], first: int) -> None:
        """As a forward does: ``pages[i]`` gets position ``first + i`` in every buffer of the layer."""
        self._write(self._layers[layer], room, gen, pages, first)

    def write_drafts(self, room: int, gen: int, pages: Sequence[int], first: int) -> None:
        self._write(self._drafts, room, gen, pages, first)

    def write_aux(self, room: int, gen: int, slot: int) -> None:
        if self._aux is not None:
            self._aux[slot] = expected(room, gen, -1, [0], self._aux.shape[1])[0]

    def _write(self, buffers: list[tuple[int, Bytes]], room: int, gen: int, pages: Sequence[int], first: int) -> None:
        positions = range(first, first + len(pages))
        for number, array in buffers:
            array[pages] = expected(room, gen, number, positions, array.shape[1])

    def differences(self, room: int, gen: int, pages: Sequence[int], first: int, slot: int | None) -> list[str]:
        """What does not hold the room's bytes, page by page and buffer by buffer."""
        positions = range(first, first + len(pages))
        wrong: list[str] = []
        for number, array in self._pages:
            same = (array[pages] == expected(room, gen, number, positions, array.shape[1])).all(axis=1)
            wrong += [
                f"buffer {number} page {pages[int(at)]} position {first + int(at)}" for at in np.nonzero(~same)[0]
            ]
        if slot is not None and self._aux is not None:
            if not np.array_equal(self._aux[slot], expected(room, gen, -1, [0], self._aux.shape[1])[0]):
                wrong.append(f"aux slot {slot}")
        return wrong

    def poison(self, pages: Sequence[int], slot: int | None = None) -> None:
        """Nobody's bytes: what a free page holds."""
        for _, array in self._pages:
            array[pages] = POISON
        if slot is not None and self._aux is not None:
            self._aux[slot] = POISON

    def strays(self, pages: Sequence[int]) -> list[int]:
        """The pages of these that do not hold poison in every buffer: somebody wrote into them while they were free."""
        clean = np.ones(len(pages), bool)
        for _, array in self._pages:
            clean &= (array[pages] == POISON).all(axis=1)
        return [pages[int(at)] for at in np.nonzero(~clean)[0]]
