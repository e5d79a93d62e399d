"""Bytes with an address, and blocks from them, for tests that write into another process."""

from __future__ import annotations

import numpy as np

from protocols.blocks import Blocks


class Memory:
    """Some bytes with an address."""

    def __init__(self, nbytes: int, value: int = 0) -> None:
        self.bytes = np.full(nbytes, value, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def blocks(self, dst: int, block: int, count: int) -> Blocks:
        """``count`` blocks of ``block`` bytes from here to ``dst``, one after the other."""
        offset = np.arange(count) * block
        return Blocks(self.address + offset, dst + offset, np.full(count, block))
