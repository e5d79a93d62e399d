"""A sub-millisecond timer for an asyncio loop.

uvloop's timers have a 1 ms grain and a sleep below that returns at once, which would make a poller spin. Linux's
timerfd has no such grain and is just another readable descriptor. Python has it built in only from 3.13.

Where a forward thread computes in Python, every release of the GIL can cost the loop a switch interval (5 ms). So the
calls hold it: they are system calls of half a microsecond that cannot block.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

from protocols.errors import EngineUnavailableError

CLOCK_MONOTONIC = 1
TFD_NONBLOCK = os.O_NONBLOCK
TFD_CLOEXEC = os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class TimerFd:
    """One-shot. Loop thread only. Raises EngineUnavailableError where the platform has no timerfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        if sys.platform != "linux":
            raise EngineUnavailableError("timerfd exists only on Linux", platform=sys.platform)
        libc = ctypes.PyDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        if self._fd < 0:
            raise EngineUnavailableError(f"timerfd_create: {os.strerror(ctypes.get_errno())}")
        self._loop = loop
        self._callback = callback
        self._spec = _Itimerspec()
        self._ref = ctypes.byref(self._spec)
        self._due: float | None = None
        try:
            loop.add_reader(self._fd, self._fire)
        except NotImplementedError:  # a loop without descriptors: leave none open
            os.close(self._fd)
            raise

    def arm(self, delay: float) -> None:
        """Fire once, after ``delay`` seconds; replaces an earlier arming."""
        nanoseconds = max(1, int(delay * 1e9))
        self._due = time.monotonic() + delay
        self._set(*divmod(nanoseconds, 1_000_000_000))

    def _set(self, seconds: int, nanoseconds: int) -> None:
        """Setting it, also to nothing, ends its being readable as a read would."""
        self._spec.value.seconds, self._spec.value.nanoseconds = seconds, nanoseconds
        self._settime(self._fd, 0, self._ref, None)

    def _fire(self) -> None:
        if self._due is not None and time.monotonic() < self._due:
            return  # armed again after it had expired, by a callback before this one
        due, self._due = self._due, None
        try:
            if due is not None:
                self._callback()
        finally:
            if self._due is None and self._fd >= 0:
                self._set(0, 0)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class CallLater:
    """The same over `loop.call_later`, for loops without descriptors (virtual time) and other platforms."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, delay: float) -> None:
        self.close()
        self._handle = self._loop.call_later(delay, self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def make_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> TimerFd | CallLater:
    """A timerfd where the loop and the platform have it, else `call_later` (1 ms grain)."""
    try:
        return TimerFd(loop, callback)
    except (EngineUnavailableError, NotImplementedError):
        return CallLater(loop, callback)
