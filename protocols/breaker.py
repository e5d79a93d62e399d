"""A circuit breaker for one peer, as a table. Pure: time is an argument.

    CLOSED ──failures reach the threshold──▶ OPEN ──retry time──▶ HALF_OPEN ──success──▶ CLOSED
                                              ▲                       │
                                              └───────failure─────────┘   (the pause doubles, jittered, bounded)

One failure blacklists nobody; a peer that keeps failing is tried by one probe at a time, and everybody else fails at
once instead of waiting for its deadline.
"""

from __future__ import annotations

import random
from enum import Enum

THRESHOLD = 3
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0


class BreakerState(Enum):
    CLOSED = "the peer is used"
    OPEN = "the peer failed repeatedly; nothing is tried until the pause is over"
    HALF_OPEN = "one probe is under way"


class Breaker:
    """See the module. Seconds are the caller's monotonic clock."""

    __slots__ = ("_failures", "_pause", "_retry_at", "_rng", "state")

    def __init__(self, rng: random.Random) -> None:
        self.state = BreakerState.CLOSED
        self._rng = rng
        self._failures = 0
        self._pause = FIRST_PAUSE_S
        self._retry_at = 0.0

    def allow(self, now: float) -> bool:
        """Whether to try now. The first caller after the pause is the probe and must report how it went."""
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause = FIRST_PAUSE_S

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= THRESHOLD:
            self.state = BreakerState.OPEN
            self._retry_at = now + self._pause * (0.75 + 0.5 * self._rng.random())
            self._pause = min(self._pause * 2, LAST_PAUSE_S)

    def retry_in(self, now: float) -> float:
        """Seconds until the next probe; 0 when one may go now or is under way."""
        return max(0.0, self._retry_at - now) if self.state is BreakerState.OPEN else 0.0
