"""Log lines that cannot flood: one budget a minute for each kind, the rest only counted (D3)."""

from __future__ import annotations

import logging
from collections.abc import Callable

PERIOD_S = 60.0


class RateLimited:
    """Loop thread. Success is DEBUG, a failed finish is WARNING; nothing here logs above that."""

    def __init__(self, name: str, now: Callable[[], float], burst: int) -> None:
        self._log = logging.getLogger(name)
        self._now = now
        self._burst = burst
        self._kinds: dict[str, tuple[float, int]] = {}

    def debug(self, text: str, *args: object) -> None:
        self._log.debug(text, *args)

    def warning(self, kind: str, text: str, *args: object) -> None:
        """Log unless this kind has used up its budget; the next period's first line tells how many were swallowed."""
        now = self._now()
        started, count = self._kinds.get(kind, (now, 0))
        if now - started >= PERIOD_S:
            if count > self._burst:
                self._log.warning("%s: %d more lines of this kind in the last minute", kind, count - self._burst)
            started, count = now, 0
        self._kinds[kind] = (started, count + 1)
        if count < self._burst:
            self._log.warning("%s", one_line(text % args))


def one_line(text: str) -> str:
    """The text with everything escaped that could start another line or steer a terminal: peers have a say in it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
