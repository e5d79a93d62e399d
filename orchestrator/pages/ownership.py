"""The owner filter of context parallelism: which pages of a chunk a rank sends.

The pages of each chunk are split over the ranks by themselves, in balanced runs (sizes differ by one at most, the
longer first). The split depends on nothing but the chunk's page count, so every rank knows every other's share, and
the shares are disjoint and leave nothing out. A chunk with fewer pages than ranks leaves some with none.

::

    contiguous, 3 ranks     | 0 | 1 | 2 |
    zigzag, 3 ranks         |0|1|2|2|1|0|      rank r has the segments r and 2 * size - 1 - r
"""

from __future__ import annotations

import numpy as np

from protocols.blocks import Ints
from protocols.errors import LayoutError
from protocols.layout import CpMode


def owned(first_position: int, count: int, mode: CpMode, rank: int, size: int) -> Ints:
    """The absolute positions, ascending, that a rank owns of a chunk's pages ``[first_position, first_position +
    count)``.

    Raises LayoutError for a rank that does not exist, a mode that does not split by whole pages, and mode "none" with
    more than one rank: each would send everything.
    """
    if not 0 <= rank < size:
        raise LayoutError("cp_rank must be below cp_size", rank=rank, size=size)
    if first_position < 0 or count < 0:
        raise LayoutError("positions must not be negative", first_position=first_position, count=count)
    match mode:
        case "none" if size == 1:
            return np.arange(first_position, first_position + count)
        case "contiguous":
            return _part(first_position, count, rank, size)
        case "zigzag":
            parts = 2 * size
            head = _part(first_position, count, rank, parts)
            tail = _part(first_position, count, parts - 1 - rank, parts)
            return np.concatenate((head, tail))
    raise LayoutError("this mode does not give every page one owner among these ranks", mode=mode, size=size)


def owned_pages(pages: Ints, first_position: int, mode: CpMode, rank: int, size: int) -> tuple[Ints, Ints]:
    """What a rank owns of a chunk whose source pages are ``pages``, the first of them at ``first_position``: its
    source pages and their absolute positions, pair by pair. Raises LayoutError, see `owned`.
    """
    positions = owned(first_position, len(pages), mode, rank, size)
    return pages[positions - first_position], positions


def _part(first: int, count: int, nth: int, parts: int) -> Ints:
    """The nth of ``parts`` balanced runs of ``count`` positions; the first ``count % parts`` have one more."""
    each, more = divmod(count, parts)
    start = first + nth * each + min(nth, more)
    return np.arange(start, start + each + (nth < more))
