"""Waiting in tests: for a condition, never for a time, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 20.0
"""Seconds after which what should have happened never will; a busy machine needs some."""


async def until(condition: Callable[[], object], what: str = "", timeout: float = PATIENCE_S) -> None:
    """Return when ``condition`` holds; fail the test, saying ``what`` never came, after ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"never: {what or condition}") from None


async def within(awaitable: Awaitable[T], timeout: float = PATIENCE_S) -> T:
    """Await, but not for ever. Raises TimeoutError."""
    async with asyncio.timeout(timeout):
        return await awaitable
