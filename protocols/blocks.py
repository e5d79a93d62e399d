"""Block math: from page lists to the (source, destination, length) blocks an engine is handed.

Pages are numbered in one index space for all layer buffers, so a plan is made once per (chunk, destination) and a
layer only adds its base addresses: ``address = base + page * item_len`` on both sides. Pure numpy; no decision about
who owns a page is taken here (see ``orchestrator.pages``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocols.errors import LayoutError, MismatchError

Ints = npt.NDArray[np.int64]

MAX_ADDRESS = 2**63 - 1
ONE = np.ones(1, np.int64)
ONE.flags.writeable = False
MARKS = 1 << 24
"""Most marks (bytes) spent on finding a repeated index; a peer says how large its pool is."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Parallel arrays, one entry a block: source address, destination address, length in bytes.

    Each block is contiguous on both sides. Addresses are those of the two processes, as int64 (user addresses fit).
    """

    src: Ints
    dst: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Sum of the lengths, in bytes."""
        return int(self.length.sum())

    def __getitem__(self, part: slice) -> Blocks:
        return Blocks(self.src[part], self.dst[part], self.length[part])

    @classmethod
    def empty(cls) -> Blocks:
        none = np.empty(0, np.int64)
        return cls(none, none, none)

    @classmethod
    def join(cls, parts: list[Blocks]) -> Blocks:
        """All blocks of ``parts``, in order."""
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.src for part in parts]),
            np.concatenate([part.dst for part in parts]),
            np.concatenate([part.length for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """Page runs contiguous on both sides: first source page, first destination page, count of pages."""

    src: Ints
    dst: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.count)

    @property
    def pages(self) -> int:
        return int(self.count.sum())

    def source_pages(self) -> Ints:
        """Every source page, in order."""
        ends = np.cumsum(self.count)
        within = np.arange(self.pages, dtype=np.int64) - np.repeat(ends - self.count, self.count)
        return np.repeat(self.src, self.count) + within


def page_array(pages: object, what: str = "pages") -> Ints:
    """``pages`` (None, sequence, numpy array, or anything with ``__array__``) as a one-dimensional int64 array.

    None counts as no pages. Raises LayoutError for another shape, for fractions and for negative pages.
    """
    if pages is None:
        return np.empty(0, np.int64)
    try:
        array = np.asarray(pages)
    except (TypeError, ValueError) as exc:  # a ragged list, a tensor on a device
        raise LayoutError(f"{what} are no array of the host: {exc}") from exc
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1:
        raise LayoutError(f"{what} must be one-dimensional", shape=array.shape)
    if array.dtype.kind not in "iu":
        raise LayoutError(f"{what} must be integers", dtype=str(array.dtype))
    if array.dtype == np.uint64 and int(array.max()) > MAX_ADDRESS:
        raise LayoutError(f"{what} hold a number beyond 63 bits", largest=int(array.max()))
    wide = array.astype(np.int64)
    if int(wide.min()) < 0:
        raise LayoutError(f"{what} hold a negative number", smallest=int(wide.min()))
    return wide


def merge_runs(src_pages: Ints, dst_pages: Ints) -> Runs:
    """Pair ``src_pages[i]`` with ``dst_pages[i]`` and merge neighbours that are contiguous on both sides.

    Raises MismatchError when the lists differ in length: nothing is ever truncated (E1).
    """
    if len(src_pages) != len(dst_pages):
        raise MismatchError(
            "source and destination page counts differ",
            source=summary(src_pages),
            destination=summary(dst_pages),
        )
    if len(src_pages) == 0:
        none = np.empty(0, np.int64)
        return Runs(none, none, none)
    if len(src_pages) == 1:
        return Runs(src_pages, dst_pages, ONE)
    breaks = np.flatnonzero((np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1)) + 1
    starts = np.concatenate((np.zeros(1, np.int64), breaks))
    ends = np.concatenate((breaks, np.array([len(src_pages)], np.int64)))
    return Runs(src_pages[starts], dst_pages[starts], (ends - starts).astype(np.int64))


def position_runs(positions: Ints) -> tuple[tuple[int, int], ...]:
    """Ascending absolute positions as (first, count) runs, the form coverage travels in."""
    if len(positions) == 0:
        return ()
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:  # ascending and without a gap
        return ((first, len(positions)),)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = np.concatenate((np.zeros(1, np.int64), breaks))
    ends = np.concatenate((breaks, np.array([len(positions)], np.int64)))
    return tuple(zip(positions[starts].tolist(), (ends - starts).tolist(), strict=True))


def layer_blocks(runs: Runs, src_base: Ints | int, dst_base: Ints | int, item_len: int) -> Blocks:
    """Blocks of one layer buffer, or of several with items of this length, one after the other: ``base + page *
    item_len``, one block a run (bytes; not yet split)."""
    return Blocks(
        np.add.outer(src_base, runs.src * item_len).flatten(),
        np.add.outer(dst_base, runs.dst * item_len).flatten(),
        np.concatenate([runs.count * item_len] * np.size(src_base)),
    )


def split(blocks: Blocks, max_bytes: int) -> Blocks:
    """The same bytes in blocks of at most ``max_bytes`` (the engine's limit), order kept."""
    if max_bytes < 1:
        raise LayoutError("a block limit must be at least one byte", max_bytes=max_bytes)
    if len(blocks) == 0 or int(blocks.length.max()) <= max_bytes:
        return blocks
    pieces = -(-blocks.length // max_bytes)
    owner = np.repeat(np.arange(len(blocks)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = nth * max_bytes
    length = np.minimum(blocks.length[owner] - offset, max_bytes)
    return Blocks(blocks.src[owner] + offset, blocks.dst[owner] + offset, length)


def check_units(indices: Ints, limit: int, what: str) -> None:
    """Raise MismatchError if an index repeats or lies outside ``[0, limit)`` (E5)."""
    if len(indices) == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= limit:
        raise MismatchError(f"{what} outside the registered region", lowest=low, highest=high, limit=limit)
    if len(indices) > 1 and _repeats(indices - low, high - low + 1):
        values, counts = np.unique(indices, return_counts=True)
        raise MismatchError(f"duplicate {what}", repeated=values[counts > 1][:4].tolist())


def _repeats(indices: Ints, span: int) -> bool:
    """Whether a number in ``[0, span)`` stands there twice. For 100,000 pages a mark each costs 0.2 ms where sorting
    costs 12 and `np.unique` 80: this is asked on the loop for every Offer."""
    if span > MARKS:
        ordered = np.sort(indices)
        return bool((ordered[1:] == ordered[:-1]).any())
    seen = np.zeros(span, bool)
    seen[indices] = True
    return int(np.count_nonzero(seen)) != len(indices)


def summary(pages: Ints) -> str:
    """A page list in a few characters, for error texts: count, first and last entries."""
    if len(pages) <= 6:
        return f"{len(pages)}{pages.tolist()}"
    head, tail = pages[:3].tolist(), pages[-2:].tolist()
    return f"{len(pages)}[{head[0]}, {head[1]}, {head[2]}, …, {tail[0]}, {tail[1]}]"
