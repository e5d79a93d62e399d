"""The state machines, as tables: prefill room, decode room, chunk, forward pass.

Two rules, after h11: everything that decides a transition stands in these tables, and the tables know no I/O. A shell
fires an event and then performs the returned actions, in order. An event without a cell raises and leaves the state
as it was. The outcome a caller sees (SUCCESS or FAILED, first cause) is decided once, elsewhere, in `outcome`; these
machines say where the *room* stands, which outlives the outcome: a failed room drains.

::

    prefill   WAITING ──ready──▶ SENDING ──landed──▶ COMMITTING ──committed──▶ SUCCEEDED
                 │                  │                    │
                 └──────fail────────┴────────fail────────┘──▶ DRAINING ──drained──▶ FAILED
                                                                 └─drain_deadline─▶ LINGERING ──drained──▶ FAILED

    decode    OFFERED ──covered──▶ COMMITTED
                 └────fail────▶ ABORTING ──quiet──▶ FAILED
                                   └─ack_deadline─▶ QUARANTINED ──quiet──▶ FAILED

    chunk     REGISTERED ──post──▶ SENDING ──land──▶ LANDED ──conclude──▶ CONCLUDED      (fail from anywhere)
                 └─degrade─▶ DEGRADED ──post──▶ SENDING

    pass      OPEN ──end──▶ ENDED          OPEN ──discard──▶ DISCARDED

    rollover  IDLE ──start──▶ ANNOUNCED ──expire──▶ DELETING ──deleted──▶ FENCED ──all_acked──▶ IDLE
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from protocols.errors import IllegalTransitionError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class Action(Enum):
    """What a shell must do after a transition."""

    SEND_DONE = "send Done(ok) with the coverage to every destination"
    SEND_COMMITTED = "send Committed(ok) to every rank"
    STOP_SUBMITTING = "drop what is queued and submit nothing further for this room"
    TELL_PEERS = "send Abort with the reason to every peer of the room"
    ACK = "send AbortAck to every destination: what is in doubt, and what is not terminal yet"
    END = "leave a tombstone and forget the room"
    ANNOUNCE = "make the new engine and send the first Rollover to every peer"
    DELETE = "fail what still uses the old session, then delete its engine off the loop"
    FENCE = "free the old session's failed leases, hold its ports, send the second Rollover"
    RELEASE = "let the old ports go"


Table = Mapping[State, Mapping[Event, tuple[State, tuple[Action, ...]]]]


class Machine(Generic[State, Event]):
    """A table and where it stands."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table[State, Event], start: State) -> None:
        self._table = table
        self.state = start

    def fire(self, event: Event) -> tuple[Action, ...]:
        """Take the event and return what to do. Raises IllegalTransitionError, with the state unchanged."""
        cell = self._table[self.state].get(event)
        if cell is None:
            raise IllegalTransitionError("no such transition", state=self.state.name, on=event.name)
        self.state, actions = cell
        return actions

    def accepts(self, event: Event) -> bool:
        return event in self._table[self.state]


class PrefillState(Enum):
    WAITING = "known, but an offer or the registration is missing"
    SENDING = "chunks are being sent"
    COMMITTING = "everything landed, the decode has not committed yet"
    DRAINING = "failed; tasks may still be running"
    LINGERING = "failed, acknowledged with unknown units; tasks are still running"
    SUCCEEDED = "committed by every destination"
    FAILED = "failed and drained"


class PrefillEvent(Enum):
    READY = "every destination has offered and a chunk is registered"
    LANDED = "the last chunk concluded"
    COMMITTED = "every destination committed"
    SKIP = "the room asks for no transfer"
    FAIL = "anything went wrong, on either side"
    DRAINED = "every task of the room is terminal"
    DRAIN_DEADLINE = "tasks are still running after the drain timeout"


_FAIL = (PrefillState.DRAINING, (Action.STOP_SUBMITTING, Action.TELL_PEERS))

PREFILL_ROOM: Table[PrefillState, PrefillEvent] = {
    PrefillState.WAITING: {
        PrefillEvent.READY: (PrefillState.SENDING, ()),
        PrefillEvent.SKIP: (PrefillState.SUCCEEDED, (Action.END,)),
        PrefillEvent.FAIL: _FAIL,
    },
    PrefillState.SENDING: {
        PrefillEvent.LANDED: (PrefillState.COMMITTING, (Action.SEND_DONE,)),
        PrefillEvent.FAIL: _FAIL,
    },
    PrefillState.COMMITTING: {
        PrefillEvent.COMMITTED: (PrefillState.SUCCEEDED, (Action.END,)),
        PrefillEvent.FAIL: _FAIL,
    },
    PrefillState.DRAINING: {
        PrefillEvent.FAIL: (PrefillState.DRAINING, ()),
        PrefillEvent.DRAINED: (PrefillState.FAILED, (Action.ACK, Action.END)),
        PrefillEvent.DRAIN_DEADLINE: (PrefillState.LINGERING, (Action.ACK,)),
    },
    PrefillState.LINGERING: {
        PrefillEvent.FAIL: (PrefillState.LINGERING, (Action.ACK,)),
        PrefillEvent.DRAINED: (PrefillState.FAILED, (Action.ACK, Action.END)),
    },
    PrefillState.SUCCEEDED: {},
    PrefillState.FAILED: {},
}


class DecodeState(Enum):
    OFFERED = "units are leased, data may arrive"
    COMMITTED = "every rank is done and covers exactly our list"
    ABORTING = "failed; not every rank has said quiet"
    QUARANTINED = "failed; a rank did not say quiet in time, or left units in doubt"
    FAILED = "failed; every unit is free again"


class DecodeEvent(Enum):
    COVERED = "every rank is done and the coverage is exact"
    FAIL = "anything went wrong, on either side"
    QUIET = "every rank is quiet about every unit, or a fence made it so"
    ACK_DEADLINE = "a rank has not acknowledged in time"


DECODE_ROOM: Table[DecodeState, DecodeEvent] = {
    DecodeState.OFFERED: {
        DecodeEvent.COVERED: (DecodeState.COMMITTED, (Action.SEND_COMMITTED, Action.END)),
        DecodeEvent.FAIL: (DecodeState.ABORTING, (Action.TELL_PEERS,)),
    },
    DecodeState.ABORTING: {
        DecodeEvent.FAIL: (DecodeState.ABORTING, ()),
        DecodeEvent.QUIET: (DecodeState.FAILED, (Action.END,)),
        DecodeEvent.ACK_DEADLINE: (DecodeState.QUARANTINED, ()),
    },
    DecodeState.QUARANTINED: {
        DecodeEvent.FAIL: (DecodeState.QUARANTINED, ()),
        DecodeEvent.QUIET: (DecodeState.FAILED, (Action.END,)),
    },
    DecodeState.COMMITTED: {},
    DecodeState.FAILED: {},
}


class ChunkState(Enum):
    REGISTERED = "known; no byte has left"
    DEGRADED = "set-up failed before a byte left: the whole chunk goes after its forward"
    SENDING = "bytes may have left"
    LANDED = "every block of it COMPLETED"
    CONCLUDED = "landed, and so did every chunk before it"
    FAILED = "its room failed"


class ChunkEvent(Enum):
    DEGRADE = "a set-up error"
    POST = "blocks were handed over"
    LAND = "nothing of it is outstanding and nothing is left to send"
    CONCLUDE = "its turn in send order"
    FAIL = "its room failed"


CHUNK: Table[ChunkState, ChunkEvent] = {
    ChunkState.REGISTERED: {
        ChunkEvent.DEGRADE: (ChunkState.DEGRADED, ()),
        ChunkEvent.POST: (ChunkState.SENDING, ()),
        ChunkEvent.LAND: (ChunkState.LANDED, ()),
        ChunkEvent.FAIL: (ChunkState.FAILED, ()),
    },
    ChunkState.DEGRADED: {
        ChunkEvent.POST: (ChunkState.SENDING, ()),
        ChunkEvent.LAND: (ChunkState.LANDED, ()),
        ChunkEvent.FAIL: (ChunkState.FAILED, ()),
    },
    ChunkState.SENDING: {
        ChunkEvent.POST: (ChunkState.SENDING, ()),
        ChunkEvent.LAND: (ChunkState.LANDED, ()),
        ChunkEvent.FAIL: (ChunkState.FAILED, ()),
    },
    ChunkState.LANDED: {
        ChunkEvent.CONCLUDE: (ChunkState.CONCLUDED, ()),
        ChunkEvent.FAIL: (ChunkState.FAILED, ()),
    },
    ChunkState.CONCLUDED: {ChunkEvent.FAIL: (ChunkState.CONCLUDED, ())},
    ChunkState.FAILED: {ChunkEvent.FAIL: (ChunkState.FAILED, ())},
}


class PassState(Enum):
    OPEN = "the forward may still fire hooks"
    ENDED = "the forward ran to its end"
    DISCARDED = "thrown away or raised: its chunks were given back"


class PassEvent(Enum):
    END = "end"
    DISCARD = "discard"


FORWARD_PASS: Table[PassState, PassEvent] = {
    PassState.OPEN: {
        PassEvent.END: (PassState.ENDED, ()),
        PassEvent.DISCARD: (PassState.DISCARDED, ()),
    },
    PassState.ENDED: {
        PassEvent.END: (PassState.ENDED, ()),
        PassEvent.DISCARD: (PassState.ENDED, ()),
    },
    PassState.DISCARDED: {
        PassEvent.END: (PassState.DISCARDED, ()),
        PassEvent.DISCARD: (PassState.DISCARDED, ()),
    },
}


class RolloverState(Enum):
    IDLE = "one engine"
    ANNOUNCED = "two engines; rooms of the old session may finish until the deadline"
    DELETING = "the old engine is draining its own batches and being deleted"
    FENCED = "the old engine is gone, its ports are held; a peer has not said that it is done with it"


class RolloverEvent(Enum):
    START = "quarantine passed its limit, or an operator asked"
    EXPIRE = "the deadline passed, or no room uses the old session any more"
    DELETED = "the old engine was deleted: nothing can land through it any more"
    ALL_ACKED = "every peer said that its tasks of the old session are terminal, or is gone"


ROLLOVER: Table[RolloverState, RolloverEvent] = {
    RolloverState.IDLE: {RolloverEvent.START: (RolloverState.ANNOUNCED, (Action.ANNOUNCE,))},
    RolloverState.ANNOUNCED: {RolloverEvent.EXPIRE: (RolloverState.DELETING, (Action.DELETE,))},
    RolloverState.DELETING: {RolloverEvent.DELETED: (RolloverState.FENCED, (Action.FENCE,))},
    RolloverState.FENCED: {RolloverEvent.ALL_ACKED: (RolloverState.IDLE, (Action.RELEASE,))},
}
