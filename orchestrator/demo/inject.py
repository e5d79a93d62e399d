"""Faults put in on purpose, beneath everything that plans and counts: the demo's comparison must notice each.

Blocks are left out or read from the wrong place after they were planned, and completion is reported for all of them,
so coverage is satisfied and only the bytes are wrong. That is what a bug in an engine would look like.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.demo.options import INJECTIONS
from orchestrator.engines.base import Engine
from orchestrator.engines.faulty import Fault, FaultyEngine
from protocols.blocks import Blocks
from protocols.layout import LayerBuffer


@dataclass(frozen=True, slots=True)
class _Reads:
    """The blocks that read from some buffers."""

    buffers: tuple[LayerBuffer, ...]

    def mask(self, blocks: Blocks) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        hit = np.zeros(len(blocks), np.bool_)
        for buffer in self.buffers:
            hit |= (blocks.src >= buffer.address) & (blocks.src < buffer.address + buffer.nbytes)
        return hit

    def leave_out(self, blocks: Blocks) -> Blocks:
        keep = ~self.mask(blocks)
        return Blocks(blocks.src[keep], blocks.dst[keep], blocks.length[keep])

    def read_elsewhere(self, blocks: Blocks, distance: int) -> Blocks:
        """Every block of these buffers reads ``distance`` bytes further on."""
        return Blocks(np.where(self.mask(blocks), blocks.src + distance, blocks.src), blocks.dst, blocks.length)


def faulty(engine: Engine, inject: str, buffers: tuple[LayerBuffer, ...]) -> Engine:
    """``engine`` with one of the demo's faults; ``buffers`` is the pool it sends from.

    ``drop-layer`` leaves out the K and V of a middle layer; ``corrupt-page`` sends V of the same place where K should
    be read, in that layer; ``skip-draft`` leaves out the draft buffers.
    """
    hooked = [buffer for buffer in buffers if buffer.hooked]
    victim = sorted({buffer.layer for buffer in hooked})[len(hooked) // 4]
    of_victim = {buffer.kind: buffer for buffer in hooked if buffer.layer == victim}
    if inject == "drop-layer":
        rewrite = _Reads(tuple(of_victim.values())).leave_out
    elif inject == "skip-draft":
        rewrite = _Reads(tuple(buffer for buffer in buffers if buffer.kind.startswith("draft"))).leave_out
    else:
        assert inject == "corrupt-page", INJECTIONS
        k, v = of_victim["k"], of_victim["v"]

        def rewrite(blocks: Blocks) -> Blocks:
            return _Reads((k,)).read_elsewhere(blocks, v.address - k.address)

    return FaultyEngine(engine, Fault(rewrite=rewrite))
