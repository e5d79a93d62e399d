"""First contact with a peer, off the loop and away from everybody else's submissions.

A peer that accepts a connection and never answers holds a native call for a minute. Three things keep that minute from
hurting: each contact has a daemon thread; the first question (a probe) is put through a *scout*, an engine of its own
that owns no memory and never closes, so that a stuck probe does not delay the end of the real engine; and the segment
is opened through the exported symbol where it may be used, which takes no lock that a submission needs.
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


def first_contact(host: str, session: Session, native: Any, abi: Abi | None) -> str:
    """Probe, then open the peer's segment on ``native``; return what went wrong, "" for nothing.

    Blocks, up to minutes: for a daemon thread, whose frames keep ``native`` alive meanwhile. The answer is a string and
    not an exception because a kept traceback would keep it alive past its end.

    Without ``abi`` the only call of the binding that opens and sends nothing is an empty write. It holds the binding's
    lock, so a peer that falls silent between the probe and this call stalls every submission for up to a minute.
    """
    with _scout_lock:
        scout = _make_scout(host)
    if scout.send_probe(session) != 0:
        return "the peer does not answer"
    if abi is not None:
        opened = abi.open_segment(session)
    else:
        ident = native.transfer_submit_write(session, 0, 0, 0)
        opened = ident != 0 and native.transfer_check_status(ident) == 1
    return "" if opened else "the peer's segment cannot be opened"
