"""How long a prefill room waits: for its offers, for something to move, for the commit; never beyond its last moment.

What the next wait is for, and what its end means, the room decides. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.clock import Clock, Timer


class Deadlines:
    """One wait at a time, and the drain's beside it."""

    __slots__ = ("_clock", "_drain", "_expired", "_latest", "_progress", "_timer")

    def __init__(self, clock: Clock, at_most: float, expired: Callable[[], object]) -> None:
        """``at_most``: seconds from now that the room may take in all; ``expired`` is called when a wait is over."""
        self._clock = clock
        self._expired = expired
        self._progress = clock.now()
        self._latest = self._progress + at_most
        self._timer: Timer | None = None
        self._drain: Timer | None = None

    def touch(self) -> None:
        """Something of the room moved."""
        self._progress = self._clock.now()

    def shorten(self, seconds: float) -> None:
        """The room has no longer than this from now on."""
        self._latest = min(self._latest, self._clock.now() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the room's last moment."""
        return self._latest - self._clock.now()

    @property
    def idle(self) -> float:
        """Seconds since something moved."""
        return self._clock.now() - self._progress

    def wait(self, seconds: float) -> None:
        """Begin a wait; it takes the place of the one before."""
        self.stop()
        self._timer = self._clock.call_later(max(0.0, min(seconds, self.left)), self._expired)

    def go_on(self, seconds: float) -> bool:
        """At the end of a wait for movement: wait on, until ``seconds`` after the last one. False if that is over, or
        the room's last moment has come."""
        left = seconds - self.idle
        if left <= 0 or self.left <= 0:
            return False
        self.wait(left)
        return True

    def stop(self) -> None:
        """Wait for nothing any more, the drain excepted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drain(self, seconds: float, expired: Callable[[], object]) -> None:
        """Call ``expired`` when what runs has not ended by then."""
        self._drain = self._clock.call_later(seconds, expired)

    def close(self) -> None:
        self.stop()
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None
