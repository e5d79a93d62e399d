"""Which pages of a worker's pool are free, and which hold the prefix of a prompt that will run again."""

from __future__ import annotations

import random

from protocols.errors import ConfigError


class PageBook:
    """Pages come out scattered, and those freed last come out first: a later request recycles an earlier one's."""

    def __init__(self, pages: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._free = list(range(pages))
        self._random.shuffle(self._free)
        self._kept: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def begin(self, prompt: int, prefix_pages: int, pages: int) -> list[int]:
        """The page list of a request, in request order: the first ``prefix_pages`` kept ones, then free ones.

        Raises ConfigError if the prefix was not kept, or too few pages are free (then nothing is taken).
        """
        kept = self._kept.get(prompt, [])
        if prefix_pages > len(kept):
            raise ConfigError("the prefix is not there", prompt=prompt, pages=prefix_pages, kept=len(kept))
        if pages - prefix_pages > len(self._free) + len(kept) - prefix_pages:
            raise ConfigError("the pool has too few free pages", wanted=pages, free=len(self._free) + len(kept))
        self._kept.pop(prompt, None)
        self._give(kept[prefix_pages:])
        fresh = [self._free.pop() for _ in range(pages - prefix_pages)]
        return kept[:prefix_pages] + fresh

    def end(self, prompt: int, pages: list[int], keep_pages: int) -> None:
        """Take a request's pages back; its first ``keep_pages`` stay as a prefix."""
        if keep_pages:
            self._kept[prompt] = pages[:keep_pages]
        self._give(pages[keep_pages:])

    def _give(self, pages: list[int]) -> None:
        self._free += self._random.sample(pages, len(pages))
