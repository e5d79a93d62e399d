"""Which tokens each chunk of a prompt makes final, in whole pages.

A page may be sent once every token in it is written, so a chunk's end is floored to a page unless the chunk is the
last. What a chunk leaves in a started page rides with the next one: the ranges tile the prompt, and each but the last
ends on a page boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens ``[start_token, end_token)`` of a request, absolute. The start lies on a page boundary."""

    start_token: int
    end_token: int
    last: bool

    @property
    def tokens(self) -> int:
        return self.end_token - self.start_token

    def positions(self, page_size: int) -> tuple[int, int]:
        """The first absolute page and the count of pages; the last range's may end in a started page."""
        first = self.start_token // page_size
        return first, -(-self.end_token // page_size) - first


class ChunkCursor:
    """Where the ranges of one request stand. Engines learn of chunks one at a time; so does this.

    A request that starts anew (preempted, retracted) needs a new cursor.
    """

    def __init__(self, page_size: int, prefix_tokens: int = 0) -> None:
        """``prefix_tokens``: tokens found in this side's cache; nothing computes them, the first range includes them.

        Raises LayoutError for a page without tokens or a negative prefix.
        """
        if page_size < 1:
            raise LayoutError("a page must hold at least one token", page_size=page_size)
        if prefix_tokens < 0:
            raise LayoutError("a prefix must not be negative", prefix_tokens=prefix_tokens)
        self._page_size = page_size
        self._computed = prefix_tokens
        self._start = 0
        self._ended = False

    def advance(self, computed_tokens: int, last: bool) -> Range | None:
        """The range that becomes final with a chunk whose forward leaves ``computed_tokens`` tokens of the request in
        the cache (absolute, prefix included).

        None when a chunk that is not the last completes no page. The last chunk always gets its range, also an empty
        one: it still delivers what goes with the end of the request. Raises LayoutError, with nothing changed, when
        the count goes backwards and after the last chunk.
        """
        if self._ended:
            raise LayoutError("a chunk after the last one", computed_tokens=computed_tokens)
        if computed_tokens < self._computed:
            raise LayoutError("the chunks go backwards", computed_tokens=computed_tokens, before=self._computed)
        self._computed = computed_tokens
        self._ended = last
        start = self._start
        end = computed_tokens if last else computed_tokens - computed_tokens % self._page_size
        if end == start and not last:
            return None
        self._start = end
        return Range(start, end, last)


def chunk_ranges(
    prompt_tokens: int, chunk_tokens: int | Sequence[int], page_size: int, prefix_tokens: int = 0
) -> tuple[Range, ...]:
    """The ranges of a whole prompt. ``chunk_tokens`` are the tokens each forward computes, the cached prefix not
    counted: one size for all (the last takes what is left), or a list of sizes that add up.

    Raises LayoutError for sizes below one, sizes that don't add up, and a prefix longer than the prompt.
    """
    if prompt_tokens < 1:
        raise LayoutError("a prompt must have tokens", prompt_tokens=prompt_tokens)
    if prefix_tokens > prompt_tokens:
        raise LayoutError("the prefix is longer than the prompt", prefix=prefix_tokens, prompt=prompt_tokens)
    cursor = ChunkCursor(page_size, prefix_tokens)
    ranges: list[Range] = []
    ends = _chunk_ends(prompt_tokens, chunk_tokens, prefix_tokens)
    for nth, end in enumerate(ends, start=1):
        made = cursor.advance(end, last=nth == len(ends))
        if made is not None:
            ranges.append(made)
    return tuple(ranges)


def _chunk_ends(prompt_tokens: int, chunk_tokens: int | Sequence[int], prefix_tokens: int) -> list[int]:
    """The tokens computed after each forward; a fully cached prompt has one that computes nothing."""
    if isinstance(chunk_tokens, int):
        if chunk_tokens < 1:
            raise LayoutError("a chunk must have tokens", chunk_tokens=chunk_tokens)
        return [*range(prefix_tokens + chunk_tokens, prompt_tokens, chunk_tokens), prompt_tokens]
    ends: list[int] = []
    computed = prefix_tokens
    for size in chunk_tokens:
        if size < 1:
            raise LayoutError("a chunk must have tokens", chunk_tokens=size)
        computed += size
        ends.append(computed)
    if computed != prompt_tokens:
        raise LayoutError("the chunks do not add up to the prompt", chunks=computed, prompt=prompt_tokens)
    return ends or [prompt_tokens]
