"""What no design can hide behind the forward.

When the link is faster than the forward: the last layer's blocks and the unfired layers', sent alone, and one control
round trip. When it is slower: all the bytes at the measured rate, less the forward.
"""

from __future__ import annotations

import time

from protocols.blocks import Blocks
from protocols.ids import Session
from scripts.benchmarks.baselines.raw import RawEngine, as_ints
from scripts.benchmarks.baselines.sending import Notifier

TRIES = 3


def send_alone(engine: RawEngine, session: Session, blocks: Blocks) -> float:
    """Seconds to write these blocks while nothing else runs: the best of some tries of two ways, spinning, which sees
    the end at once but takes a core, and the sleeping poll."""
    return min(
        seconds
        for _ in range(TRIES)
        for seconds in (_spinning(engine, session, blocks), _sleeping(engine, session, blocks))
    )


def _spinning(engine: RawEngine, session: Session, blocks: Blocks) -> float:
    ints = as_ints(blocks)
    start = time.perf_counter()
    engine.wait_spinning([engine.write_async(session, ints)])
    return time.perf_counter() - start


def _sleeping(engine: RawEngine, session: Session, blocks: Blocks) -> float:
    start = time.perf_counter()
    engine.send([(session, blocks)])
    return time.perf_counter() - start


def round_trip(notifier: Notifier) -> float:
    """Seconds to the decode and back."""
    start = time.perf_counter()
    notifier.round_trip()
    return time.perf_counter() - start


def limit(tail: float, trip: float, whole: float, forward: float) -> float:
    """Seconds of exposed time: ``tail`` and ``whole`` are the last layer's and all blocks' times alone."""
    return max(tail, whole - forward) + trip
