"""What becomes of writes that are under way to one decode.

A write may reach the decode's memory from its submission until it is seen COMPLETED, or until the engine it was sent to
is deleted. If it FAILED, or its writer died, nobody learns whether and when it lands.
"""

from __future__ import annotations

from orchestrator.testing.model.state import Effect, Write, Writes


def engine_changed(writes: Writes, effect: Effect) -> Writes:
    """An engine was deleted: nothing reaches it, and what only its sockets held is gone. Or another listens there."""
    if effect.kind == "deleted":
        mine = {w for w in writes if w.session == effect.session}
        return (writes - mine) | {w._replace(reaches=False) for w in mine if w.running}
    return frozenset(w._replace(reaches=w.reaches or w.session == effect.session) for w in writes)


def write_changed(writes: Writes, rank: int, effect: Effect, alive: bool) -> Writes:
    if effect.kind == "submit":
        return writes | {Write(rank, effect.gen, effect.page, effect.session, True, alive)}
    name = (rank, effect.gen, effect.page, effect.session, True)
    mine = {w for w in writes if (w.rank, w.gen, w.page, w.session, w.running) == name}
    if effect.kind == "landed":
        return writes - mine
    return (writes - mine) | {w._replace(running=False) for w in mine if w.reaches}


def orphaned(writes: Writes, rank: int) -> Writes:
    """Their writer died: what its sockets held may land."""
    mine = {w for w in writes if w.rank == rank and w.running}
    return (writes - mine) | {w._replace(running=False) for w in mine if w.reaches}
