"""What a simulated run changes of the process it runs in, and gives back."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Iterator

from orchestrator import progress, rollover
from orchestrator.testing.simhost import World

RUN_CPU_S = 60.0
"""A run that has used so much CPU time (seconds; usually 0.1) hangs in a callback."""
LONGEST_POLL_S = 0.25
"""The pacer's slowest pace here: virtual seconds cost real ones only when something happens in them."""


class CallbackStuckError(KeyboardInterrupt):
    """Raised into the callback that runs when `RUN_CPU_S` is used up; asyncio lets only this kind through."""


@contextlib.contextmanager
def watchdog() -> Iterator[None]:
    """Virtual time cannot see a callback that loops: CPU time can. Main thread only, nothing elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def bark(*_: object) -> None:
        raise CallbackStuckError

    before = signal.signal(signal.SIGVTALRM, bark)
    signal.setitimer(signal.ITIMER_VIRTUAL, RUN_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


class _Errors(logging.Handler):
    """The product logs at ERROR only what it did not expect."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        exc = record.exc_info[1] if record.exc_info else None
        self._lines.append(f"{record.name}: {record.getMessage()}: {exc!r}")


@contextlib.contextmanager
def surroundings(world: World, errors: list[str]) -> Iterator[None]:
    """What a run changes of the process, and gives back: polling pace, held ports, logging, garbage collection."""

    class SimPorts:
        """Stands for `orchestrator.engines.ports.HeldPorts`."""

        def __init__(self, loop: object, ports: tuple[int, ...]) -> None:
            self._ports = tuple(ports)
            world.fabric.hold_ports(self._ports)

        def release(self) -> None:
            world.fabric.release_ports(self._ports)
            self._ports = ()

    loggers = [logging.getLogger(name) for name in ("kvferry", "orchestrator")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    handler = _Errors(errors)
    paces, ports = (progress.SHORTEST_S, progress.LONGEST_S), vars(rollover)["HeldPorts"]
    progress.SHORTEST_S, progress.LONGEST_S = 0.001, LONGEST_POLL_S
    vars(rollover)["HeldPorts"] = SimPorts
    collecting = gc.isenabled()
    gc.disable()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        progress.SHORTEST_S, progress.LONGEST_S = paces
        vars(rollover)["HeldPorts"] = ports
        if collecting:
            gc.enable()
