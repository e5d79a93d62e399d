"""The one planner: which source bytes of a chunk go to which bytes of a destination. Pure.

Layer-wise, fallback and monolithic sends all take their blocks from the same `ChunkPlan`, so they cannot differ; page
ownership is decided before (``positions``) and never derived again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protocols.blocks import Blocks, Ints, Runs, layer_blocks, merge_runs, position_runs, split, summary
from protocols.errors import MismatchError
from protocols.layout import Layout, Pair
from protocols.leases import UnitSet


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Pages of one chunk for one destination: merged runs, and the absolute positions they stand for."""

    runs: Runs
    positions: tuple[tuple[int, int], ...]

    def blocks(self, pairs: Sequence[Pair], max_bytes: int) -> Blocks:
        """Blocks of these buffers, none longer than ``max_bytes``."""
        return pair_blocks(self.runs, pairs, max_bytes)


def pair_blocks(runs: Runs, pairs: Sequence[Pair], max_bytes: int) -> Blocks:
    """Blocks of these runs in every one of these buffers, none longer than ``max_bytes``."""
    if len(runs) == 0:
        return Blocks.empty()
    alike: dict[int, list[Pair]] = {}
    for pair in pairs:
        alike.setdefault(pair.src.item_len, []).append(pair)
    parts = [
        layer_blocks(
            runs,
            np.array([pair.src.address for pair in same], np.int64),
            np.array([pair.dst.address for pair in same], np.int64),
            item_len,
        )
        for item_len, same in alike.items()
    ]
    return split(Blocks.join(parts), max_bytes)


def plan_chunk(pages: Ints, positions: Ints, prefix_pages: int, destination: Ints) -> ChunkPlan:
    """Pair a chunk's source pages, at absolute ``positions`` of the request, with a destination's page list.

    ``destination[i]`` is page ``prefix_pages + i`` of the request; positions below the prefix are not sent. Raises
    MismatchError when the chunk reaches beyond the destination's list: nothing is truncated (E1).
    """
    if len(pages) != len(positions):
        raise MismatchError("a chunk needs one position a page", pages=len(pages), positions=len(positions))
    if len(positions) > 1 and not bool((positions[1:] > positions[:-1]).all()):
        raise MismatchError("positions must ascend", positions=summary(positions))
    first = int(np.searchsorted(positions, prefix_pages))
    wanted = positions[first:]
    index = wanted - prefix_pages
    if len(index) and int(index[-1]) >= len(destination):
        raise MismatchError(
            "the prefill has more pages than the decode offered",
            source=summary(positions),
            destination=summary(destination),
            prefix_pages=prefix_pages,
        )
    return ChunkPlan(merge_runs(pages[first:], destination[index]), position_runs(wanted))


def check_total(end_token: int, total_tokens: int, page_size: int, prefix_pages: int, destination: Ints) -> None:
    """At the last chunk: both sides must mean the same request. Raises MismatchError."""
    pages = -(-end_token // page_size)
    if end_token != total_tokens or pages != prefix_pages + len(destination):
        raise MismatchError(
            "the prefill and the decode disagree about the request's length",
            prefill_tokens=end_token,
            decode_tokens=total_tokens,
            prefill_pages=pages,
            decode_pages=f"{prefix_pages} + {summary(destination)}",
        )


def units_at(layout: Layout, blocks: Blocks, indices: Iterable[int]) -> UnitSet:
    """The destination units that these blocks write to, by address, in the destination's ``layout``."""
    chosen = np.fromiter(indices, np.int64)
    first, last = blocks.dst[chosen], blocks.dst[chosen] + blocks.length[chosen] - 1
    found: dict[str, list[Ints]] = {"page": [], "aux": [], "state": []}
    for buffer in layout.buffers:
        if buffer.unit not in found:
            continue
        inside = (first >= buffer.address) & (first < buffer.address + buffer.nbytes)
        begin = (first[inside] - buffer.address) // buffer.item_len
        end = (last[inside] - buffer.address) // buffer.item_len
        found[buffer.unit] += [np.arange(b, e + 1) for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
    return UnitSet(*(np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64) for parts in found.values()))
