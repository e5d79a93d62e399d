"""What an engine refuses before a transport sees it: the registered regions, and the check of one batch."""

from __future__ import annotations

from bisect import bisect_right

from orchestrator.engines.base import EngineLimits
from protocols.blocks import Blocks
from protocols.errors import ConfigError


class Regions:
    """The registered memory of one engine: disjoint ranges ``[address, address + nbytes)``, in bytes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, nbytes: int) -> None:
        """Raises ConfigError if the range is empty or overlaps another."""
        if nbytes < 1 or address < 1:
            raise ConfigError("a memory region must hold at least one byte", address=address, nbytes=nbytes)
        at = bisect_right(self._starts, address)
        overlaps_before = at > 0 and self._ends[at - 1] > address
        overlaps_after = at < len(self._starts) and self._starts[at] < address + nbytes
        if overlaps_before or overlaps_after:
            raise ConfigError("a memory region overlaps one already registered", address=address, nbytes=nbytes)
        self._starts.insert(at, address)
        self._ends.insert(at, address + nbytes)

    def remove(self, address: int) -> None:
        """Raises ConfigError if no region starts at ``address``."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or self._starts[at] != address:
            raise ConfigError("no memory region is registered at this address", address=address)
        del self._starts[at], self._ends[at]

    def first(self) -> int | None:
        """The lowest registered address."""
        return self._starts[0] if self._starts else None

    def around(self, address: int) -> tuple[int, int]:
        """The region that holds ``address``, as (first, end); (0, 0) if none does."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or self._ends[at] <= address:
            return 0, 0
        return self._starts[at], self._ends[at]

    def hold(self, address: int, nbytes: int) -> bool:
        """True if all of ``[address, address + nbytes)`` lies in one region."""
        first, end = self.around(address)
        return first <= address and address + nbytes <= end


def admit(blocks: Blocks, limits: EngineLimits, regions: Regions) -> tuple[list[int], list[int], list[int]]:
    """The batch as Python ints (source, destination, length), checked.

    Raises ConfigError for no or too many blocks, arrays of unequal length, an empty or oversized block, a negative
    destination, and a source outside ``regions``. The destination's own regions only the destination knows.
    """
    count = len(blocks)
    if not 1 <= count <= limits.max_batch_blocks:
        raise ConfigError(
            "a batch takes at least one block and no more than the limit", blocks=count, limit=limits.max_batch_blocks
        )
    src, dst, length = blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist()
    if not len(src) == len(dst) == count:
        raise ConfigError(
            "sources, destinations and lengths differ in number", src=len(src), dst=len(dst), length=count
        )
    if min(length) < 1 or max(length) > limits.max_block_bytes:
        raise ConfigError(
            "a block is empty or too large", least=min(length), most=max(length), limit=limits.max_block_bytes
        )
    if min(dst) < 0:
        raise ConfigError("a destination address is negative", dst=min(dst))
    first = end = 0
    for address, nbytes in zip(src, length, strict=True):
        if not (first <= address and address + nbytes <= end):
            first, end = regions.around(address)
            if address + nbytes > end:
                raise ConfigError("a source lies outside the registered regions", src=address, nbytes=nbytes)
    return src, dst, length
