"""Paged pools in memory that two processes map: the decode's engine writes it, the measuring process reads it back.

So every byte of every run can be compared, in one process, with the source it came from. The content is random and
new for each run: `refresh` XORs a random word into random pages, which changes every byte.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from orchestrator import ChunkSpec
from protocols.blocks import Blocks, Ints, layer_blocks, merge_runs, split
from protocols.layout import LayerBuffer, Layout

Bytes = npt.NDArray[np.uint8]
SCRATCH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """What both pools have in common. ``drafts`` buffers have no hook: they are sent after the forward."""

    kind: Literal["mha", "mla"]
    layers: int
    item_len: int
    page_size: int = 64
    drafts: int = 0

    @property
    def buffers(self) -> int:
        return self.layers * (2 if self.kind == "mha" else 1) + self.drafts


MHA_64 = Shape("mha", layers=32, item_len=16 << 10)
MLA_79 = Shape("mla", layers=78, drafts=1, item_len=16 << 10)


class SharedPool:
    """``shape.buffers`` page buffers and a scratch buffer. Made in one process, opened by `path` in another."""

    def __init__(self, shape: Shape, pages: int, path: str | None = None) -> None:
        self.shape = shape
        self.pages = pages
        nbytes = shape.buffers * pages * shape.item_len + SCRATCH_BYTES
        if path is None:
            self._fd = os.memfd_create("kvferry-bench")
            os.ftruncate(self._fd, nbytes)
        else:
            self._fd = os.open(path, os.O_RDWR)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}" if path is None else path
        self._memory = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        self.body: Bytes = self._memory[:-SCRATCH_BYTES].reshape(shape.buffers, pages, shape.item_len)
        """By buffer and page."""
        self.layout = self._layout()

    def _layout(self) -> Layout:
        kinds = ("k", "v") if self.shape.kind == "mha" else ("mla",)
        names = [(kind, layer, True) for layer in range(self.shape.layers) for kind in kinds]
        names += [(f"draft_{kinds[0]}", self.shape.layers + draft, False) for draft in range(self.shape.drafts)]
        buffers = [
            LayerBuffer(
                id=number,
                kind=kind,
                layer=layer,
                address=self.body[number].ctypes.data,
                nbytes=self.body[number].nbytes,
                item_len=self.shape.item_len,
                hooked=hooked,
            )
            for number, (kind, layer, hooked) in enumerate(names)
        ]
        scratch = self._memory[-SCRATCH_BYTES:]
        buffers.append(
            LayerBuffer(
                id=len(buffers),
                kind="scratch",
                layer=0,
                address=scratch.ctypes.data,
                nbytes=scratch.nbytes,
                item_len=scratch.nbytes,
            )
        )
        return Layout(
            page_size=self.shape.page_size,
            dtype="uint8",
            contract="kvferry-bench",
            num_layers=self.shape.layers + self.shape.drafts,
            kv_heads=0 if self.shape.kind == "mla" else 1,
            head_dim=1,
            buffers=tuple(buffers),
        )

    def fill(self, seed: int) -> None:
        """Random content, once."""
        rng = np.random.Generator(np.random.SFC64(seed))
        for buffer in self.body:
            buffer[...] = np.frombuffer(rng.bytes(buffer.nbytes), np.uint8).reshape(buffer.shape)

    def refresh(self, rng: np.random.Generator, pages: Ints | None = None) -> None:
        """New random content, everywhere or in these pages: every byte changes."""
        word = rng.integers(1, 256, 8, np.uint8).view(np.uint64)[0]
        for buffer in self.body:
            words = buffer.view(np.uint64)
            if pages is None:
                np.bitwise_xor(words, word, out=words)
            else:
                words[pages] ^= word

    def differences(self, other: SharedPool, mine: Ints, theirs: Ints) -> list[tuple[int, int]]:
        """The (buffer, index into the page lists) pairs of ours that ``other`` does not hold byte for byte."""
        wrong: list[tuple[int, int]] = []
        for number, (source, target) in enumerate(zip(self.body, other.body, strict=True)):
            if not np.array_equal(source[mine], target[theirs]):
                differing = np.flatnonzero((source[mine] != target[theirs]).any(axis=1))
                wrong += [(number, index) for index in differing.tolist()]
        return wrong

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Request:
    """One request's pages on both sides, by absolute position; ``cuts`` are the chunks' ends in pages."""

    number: int
    source: Ints
    target: Ints
    cuts: tuple[int, ...]

    def spec(self, chunk: int, gen: int, page_size: int) -> ChunkSpec:
        """Its nth chunk."""
        first = self.cuts[chunk - 1] if chunk else 0
        end = self.cuts[chunk]
        return ChunkSpec(
            room=self.number,
            gen=gen,
            start_token=first * page_size,
            pages=np.ascontiguousarray(self.source[first:end]),
            last=chunk == len(self.cuts) - 1,
        )


def requests(
    count: int, chunks: int, pages_each: int, *, scattered: bool, rng: np.random.Generator, first: int = 0
) -> list[Request]:
    """Requests with disjoint pages. Scattered: no two pages of a list are neighbours, so nothing merges."""
    total = count * pages_each
    source, target = np.arange(total), np.arange(total)
    if scattered:
        source, target = 2 * rng.permutation(total), 2 * rng.permutation(total)
    bounds = np.linspace(0, pages_each, chunks + 1).astype(int)[1:]
    parts = [slice(i * pages_each, (i + 1) * pages_each) for i in range(count)]
    return [Request(first + i, source[p], target[p], tuple(bounds.tolist())) for i, p in enumerate(parts)]


def pages_needed(count: int, pages_each: int, *, scattered: bool) -> int:
    return count * pages_each * (2 if scattered else 1)


def blocks_of(
    source: Layout, target: Layout, layers: Sequence[int], pages: Ints, other: Ints, max_bytes: int = 1 << 20
) -> Blocks:
    """Blocks of all page buffers of these layers, neighbours merged: what each baseline sends."""
    twins = {(buffer.kind, buffer.layer): buffer for buffer in target.buffers}
    runs = merge_runs(pages, other)
    wanted = set(layers)
    parts = [
        layer_blocks(runs, buffer.address, twins[buffer.kind, buffer.layer].address, buffer.item_len)
        for buffer in source.unit_buffers("page")
        if buffer.layer in wanted
    ]
    return split(Blocks.join(parts), max_bytes)
