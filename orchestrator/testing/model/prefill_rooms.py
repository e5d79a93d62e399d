"""One prefill rank, first part: its rooms. What `orchestrator.prefill_room` and `destination` decide, over the same
table. Thawed, given one event, frozen again; see `decode_rooms`.

Each room has one chunk, and each destination of it one block for every page this rank writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from orchestrator.testing.model.bounds import Bounds, Violation
from orchestrator.testing.model.state import (
    Block,
    Destination,
    Effect,
    Message,
    PrefillRoom,
    PrefillSide,
    Said,
    Tombstone,
)
from protocols.errors import IllegalTransitionError
from protocols.machines import PREFILL_ROOM, Action, Machine, PrefillEvent, PrefillState

LIVE = (PrefillState.WAITING, PrefillState.SENDING, PrefillState.COMMITTING)
"""The outcome is open, or a thread has decided it and the loop does not know yet."""


class PrefillRooms:
    """See the module. `prefill.Prefill` adds links, sessions and what may happen."""

    def __init__(self, bounds: Bounds, rank: int, side: PrefillSide) -> None:
        self.bounds = bounds
        self.rank = rank
        self.before = side
        self.links = list(side.links)
        self.rooms: dict[int, PrefillRoom] = {}
        self.stones: dict[int, Tombstone] = {}
        for n, room in enumerate(side.rooms):
            if isinstance(room, PrefillRoom):
                self.rooms[n + 1] = room
            elif room is not None:
                self.stones[n + 1] = room
        self.registered = list(side.registered)
        self.owed = side.owed
        self.broken = side.broken
        self.effects: list[Effect] = []
        self._acting = False
        self._ended: dict[int, PrefillRoom] = {}
        """Rooms that ended in this step: an action may still follow."""

    def freeze(self) -> PrefillSide:
        self._pay_owed()
        for gen in self.stones:  # a later registration changes nothing
            self.registered[gen - 1] = True
            if gen < self.bounds.generations:
                self.stones[gen] = replace(self.stones[gen], outcome=None)
        for gen, room in self.rooms.items():
            self.rooms[gen] = _forgetful(room)
        return replace(
            self.before,
            links=tuple(self.links),
            rooms=tuple(self.rooms.get(n + 1) or self.stones.get(n + 1) for n in range(self.bounds.generations)),
            registered=tuple(self.registered),
            owed=self.owed,
            broken=self.broken,
        )

    def _post(self, decode: int, peer: int, dial: int, message: Message) -> None:
        """On the link of that dial, if it is still there."""
        link = self.links[decode]
        if link is not None and (link.peer, link.dial) == (peer, dial):
            self.effects.append(Effect("post", decode, message))

    def _pay_owed(self) -> None:
        """`Lane.when_idle`: no task of that session runs or will run."""
        for decode, peer, dial, session in sorted(self.owed):
            if not self._is_busy(decode, session):
                self.owed -= {(decode, peer, dial, session)}
                self._post(decode, peer, dial, Message("rollover_ack", session=session))

    def _is_busy(self, decode: int, session: int) -> bool:
        mine = [room.destinations[decode] for room in self.rooms.values()]
        return any(d is not None and d.session == session and d.pages_in("queued", "inflight") for d in mine)

    # -- room ----------------------------------------------------------------------------------------------------

    def _update(self, gen: int, **fields: Any) -> PrefillRoom:
        self.rooms[gen] = replace(self.rooms[gen], **fields)
        return self.rooms[gen]

    def _update_destination(self, gen: int, decode: int, destination: Destination) -> None:
        self._update(gen, destinations=with_item(self.rooms[gen].destinations, decode, destination))

    def _set_block(self, gen: int, decode: int, page: int, block: Block) -> None:
        destination = self.rooms[gen].destinations[decode]
        assert destination is not None
        blocks = tuple((at, block if at == page else was) for at, was in destination.blocks)
        self._update_destination(gen, decode, replace(destination, blocks=blocks))

    def _effect(self, kind: Literal["submit", "landed", "failed"], gen: int, decode: int, page: int) -> None:
        destination = self.rooms[gen].destinations[decode]
        assert destination is not None
        self.effects.append(Effect(kind, decode, gen=gen, page=page, session=destination.session))

    def _end_outcome(self, gen: int, outcome: Literal["ok", "failed"]) -> bool:
        if self.rooms[gen].outcome is not None:
            return False
        self._update(gen, outcome=outcome)
        return True

    def _is_complete(self, room: PrefillRoom) -> bool:
        return all(destination is not None for destination in room.destinations)

    def _is_ready(self, room: PrefillRoom) -> bool:
        return room.state is PrefillState.WAITING and room.registered and self._is_complete(room)

    def _ready(self, gen: int) -> None:
        """First contact with the last destination was made (`_connect`), everything else was there."""
        room = self.rooms[gen]
        for decode, destination in enumerate(room.destinations):
            link = self.links[decode]
            if destination is None or link is None or link.session != destination.session:
                self.fail(gen)  # rolled over meanwhile
                return
        self._fire(gen, PrefillEvent.READY)
        for decode, destination in enumerate(room.destinations):
            assert destination is not None
            mine = [page for page in destination.pages if self.bounds.owner_of(page) == self.rank]
            block: Block = "inflight" if self.bounds.no_queue else "queued"
            blocks = tuple((page, block) for page in mine)
            self._update_destination(gen, decode, replace(destination, blocks=blocks))
            for page, _ in blocks if self.bounds.no_queue else ():
                self._effect("submit", gen, decode, page)
        self._check_landed(gen)  # a rank may have nothing to write

    def _handover_done(self, gen: int) -> None:
        self._check_landed(gen)
        if gen in self.rooms:
            self._check_drained(gen)

    def _check_landed(self, gen: int) -> None:
        """The chunk concludes."""
        room = self.rooms[gen]
        if room.state is not PrefillState.SENDING:
            return
        if any(d is not None and d.pages_in("queued", "inflight", "failed", "dropped") for d in room.destinations):
            return
        if room.outcome == "failed":  # a thread aborted meanwhile
            self.fail(gen)
        else:
            self._fire(gen, PrefillEvent.LANDED)

    def committed(self, gen: int, decode: int) -> None:
        destination = self.rooms[gen].destinations[decode]
        assert destination is not None
        self._update_destination(gen, decode, replace(destination, committed=True))
        room = self.rooms[gen]
        if room.state is PrefillState.COMMITTING and all(d is not None and d.committed for d in room.destinations):
            if self._end_outcome(gen, "ok"):
                self.effects.append(Effect("succeeded", gen=gen))
                self._fire(gen, PrefillEvent.COMMITTED)
            else:
                self.fail(gen)

    def fail(self, gen: int) -> None:
        self._end_outcome(gen, "failed")
        room = self.rooms[gen]
        if room.outcome != "failed":
            return
        if Machine(PREFILL_ROOM, room.state).accepts(PrefillEvent.FAIL):
            self._fire(gen, PrefillEvent.FAIL)
        if gen in self.rooms:
            self._check_drained(gen)

    def _outstanding(self, room: PrefillRoom) -> int:
        return sum(len(d.pages_in("queued", "inflight")) for d in room.destinations if d is not None)

    def _check_drained(self, gen: int) -> None:
        room = self.rooms[gen]
        if self._outstanding(room) == 0 and not self._acting:
            if Machine(PREFILL_ROOM, room.state).accepts(PrefillEvent.DRAINED):
                self._fire(gen, PrefillEvent.DRAINED)

    def _drain_expired(self, gen: int) -> None:
        if Machine(PREFILL_ROOM, self.rooms[gen].state).accepts(PrefillEvent.DRAIN_DEADLINE):
            self._fire(gen, PrefillEvent.DRAIN_DEADLINE)

    def _fire(self, gen: int, event: PrefillEvent) -> None:
        machine = Machine(PREFILL_ROOM, self.rooms[gen].state)
        actions = machine.fire(event)
        self._update(gen, state=machine.state)
        self._acting = True
        for action in actions:
            self._perform(gen, action)
        self._acting = False

    def _perform(self, gen: int, action: Action) -> None:
        room = self.rooms.get(gen) or self._ended[gen]
        match action:
            case Action.STOP_SUBMITTING:
                self._stop(gen)
            case Action.TELL_PEERS | Action.SEND_DONE | Action.ACK:
                if action is Action.SEND_DONE and not self._has_landed(room):
                    raise Violation(f"V4: Done(ok) of gen {gen}, which has failed or has not landed")
                for decode, d in enumerate(room.destinations):
                    if d is not None:
                        self._post(decode, d.peer, d.dial, self._message(action, gen, d))
            case Action.END:
                self._end(gen)
            case _:
                raise IllegalTransitionError("not an action of a prefill room", action=action.name)

    def _has_landed(self, room: PrefillRoom) -> bool:
        blocks = [block for d in room.destinations if d is not None for _, block in d.blocks]
        return room.outcome is None and room.state is PrefillState.COMMITTING and set(blocks) <= {"landed"}

    def _message(self, action: Action, gen: int, destination: Destination) -> Message:
        """Of an AbortAck: FAILED blocks are in doubt, those still running unknown, all others quiet."""
        match action:
            case Action.TELL_PEERS:
                return Message("abort", gen)
            case Action.SEND_DONE:
                return Message("done", gen, pages=destination.pages_in("landed"))
        unknown, in_doubt = destination.pages_in("inflight"), destination.pages_in("failed")
        return Message("ack", gen, pages=unknown, in_doubt=in_doubt)

    def _stop(self, gen: int) -> None:
        if gen not in self.rooms:
            raise Violation(f"gen {gen} stops submitting after its end")
        self._update(gen, stopped=True)
        for decode, destination in enumerate(self.rooms[gen].destinations):
            if destination is not None:
                for page in destination.pages_in("queued"):
                    self._set_block(gen, decode, page, "dropped")

    def _end(self, gen: int) -> None:
        if gen not in self.rooms:
            raise Violation(f"V4: gen {gen} ends twice")
        room = self.rooms[gen]
        if room.outcome != {PrefillState.SUCCEEDED: "ok", PrefillState.FAILED: "failed"}.get(room.state):
            raise Violation(f"V4: gen {gen} ends as {room.state.name}, its outcome is {room.outcome or 'open'}")
        if self._outstanding(room):
            raise Violation(f"C5: the source pages of gen {gen} are free, and a write may still read them")
        said = [
            Said(d.peer, d.session, d.pages_in("failed")) if d is not None and d.pages_in("failed") else None
            for d in room.destinations
        ]
        self.stones[gen] = Tombstone(room.outcome, tuple(said))
        self._ended[gen] = self.rooms.pop(gen)


def with_item(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def _forgetful(room: PrefillRoom) -> PrefillRoom:
    """Without what no step asks for any more: of a failed room, which quiet blocks landed and which never left."""
    if room.outcome != "failed" or room.state in LIVE:
        return room
    return replace(room, registered=True, destinations=tuple(d and _quiet_forgotten(d) for d in room.destinations))


def _quiet_forgotten(destination: Destination) -> Destination:
    blocks = tuple((page, block) for page, block in destination.blocks if block in ("inflight", "failed", "queued"))
    return replace(destination, committed=False, pages=(), blocks=blocks)
