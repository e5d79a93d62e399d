"""Wait, within a bound, for an engine's own batches: the first half of every ``close``."""

from __future__ import annotations

import asyncio
import logging

from orchestrator.engines.base import Engine

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.002
"""Seconds between two polls. uvloop's timers have a grain of 1 ms; anything below would spin there."""


async def drain(engine: Engine, timeout: float) -> bool:
    """Poll until nothing is pending or ``timeout`` seconds have passed; True if nothing is pending."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while engine.pending and loop.time() < deadline:
        poll_guarded(engine)
        if engine.pending:
            await asyncio.sleep(POLL_INTERVAL)
    return engine.pending == 0


def poll_guarded(engine: Engine) -> None:
    """Poll on behalf of nobody in particular: a callback that raises is logged."""
    try:
        engine.poll()
    except Exception:
        log.exception("a completion callback failed")
