"""First contact with a peer, off the loop and away from everybody else's submissions.

A peer that accepts a connection and never answers holds a native call for a minute. Three things keep that minute from
hurting: each contact has a daemon thread; the first question (a probe) is put through a *scout*, an engine of its own
that owns no memory and never closes, so that a stuck probe does not delay the end of the real engine; and the segment
is opened through the exported symbol where it may be used, which takes no lock that a submission needs.

What stays: a process that ends in the very moment a stuck probe returns may abort (exit 134). The interpreter ends its
daemon threads by unwinding them, which the binding's frames do not allow.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from orchestrator.engines import mooncake_env
from orchestrator.engines.mooncake_abi import Abi
from protocols.errors import EngineUnavailableError
from protocols.ids import Session

_scout_lock = threading.Lock()


@functools.cache
def _make_scout(host: str) -> Any:
    scout = mooncake_env.load().TransferEngine()
    if scout.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise EngineUnavailableError("mooncake could not start its probing engine", host=host)
    # One reference is never given back: deleting an engine takes a second, which no interpreter's exit should wait for.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(scout))
    return scout


class FirstContacts:
    """First contacts of one native engine, each in a daemon thread, and their end."""

    def __init__(self, host: str, native: Any, abi: Abi | None) -> None:
        """``abi`` only if its ``open_segment`` may be used.

        Without it the one call of the binding that opens and sends nothing is an empty write. It holds the binding's
        lock, so a peer that falls silent between probe and opening stalls every submission for up to a minute.
        """
        self._host = host
        self._native = native
        self._abi = abi
        self._opening = 0
        self._changed = threading.Condition()

    def contact(self, session: Session) -> str:
        """Probe, then open; return what went wrong, "" for nothing. Blocks, up to minutes."""
        with _scout_lock:
            scout = _make_scout(self._host)
        if scout.send_probe(session) != 0:
            return "the peer does not answer"
        with self._changed:
            if self._native is None:
                return "the engine was closed meanwhile"
            native = self._native
            self._opening += 1
        try:
            return "" if self._open(native, session) else "the peer's segment cannot be opened"
        finally:
            del native  # before anybody is told: the last reference to go deletes the engine
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    def _open(self, native: Any, session: Session) -> bool:
        if self._abi is not None:
            return self._abi.open_segment(session)
        ident = native.transfer_submit_write(session, 0, 0, 0)
        return bool(ident != 0 and native.transfer_check_status(ident) == 1)

    def shut(self) -> None:
        """Let none touch the native engine any more; blocks while one does. Probes are not waited for."""
        with self._changed:
            self._native = None
            self._changed.wait_for(lambda: self._opening == 0)
