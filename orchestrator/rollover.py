"""Engine rollover: how the decode empties its quarantine without a restart (N11).

A new engine over the same memory is made and announced; rooms of the old session finish or fail until a deadline; the
old engine is deleted, which is the fence for everything that was offered under its session; its ports are held until
every peer has said that none of its tasks uses that session any more, however many rollovers later that is. Loop thread
only; the shell around `protocols.machines.ROLLOVER`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.clock import Timer
from orchestrator.engines.base import Engine
from orchestrator.engines.ports import HeldPorts
from orchestrator.link import Link
from protocols.errors import BusyError, ConfigError, IllegalTransitionError, TransferError
from protocols.ids import Session
from protocols.machines import ROLLOVER, Action, DecodeState, Machine, RolloverEvent, RolloverState
from protocols.messages import Rollover

if TYPE_CHECKING:
    from orchestrator.decode_room import DecodeRoom
    from orchestrator.receiver import Receiver

MAX_FENCED = 64
"""Deleted engines whose ports are held at a time; there are about two thousand ports."""
MakeEngine = Callable[[], Engine]
"""Makes another engine with every region of the layout registered. Loop thread; a few milliseconds."""


@dataclass(slots=True)
class _Fenced:
    """A deleted engine whose ports are held."""

    session: Session
    ports: HeldPorts
    awaited: dict[Link, None]
    """Peers that have not said that they are done with it."""


class EngineRollover:
    """At most two engines are alive: the next rollover waits for the old engine's end."""

    def __init__(self, receiver: Receiver, make_engine: MakeEngine | None) -> None:
        self.machine = Machine(ROLLOVER, RolloverState.IDLE)
        self.fences = 0
        """Old engines deleted so far."""
        self._receiver = receiver
        self._make_engine = make_engine
        self._old: Engine | None = None
        self._new: Engine | None = None
        self._timer: Timer | None = None
        self._retry: Timer | None = None
        self._fenced: list[_Fenced] = []
        """The one of the rollover under way comes last; the others are left from earlier ones."""
        self._kept: list[HeldPorts] = []
        """Held until this side ends."""
        self._suspect: set[Session] = set()
        self._reason = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def possible(self) -> bool:
        """Whether `start` would begin one now."""
        return self._make_engine is not None and self._old_engine_ended and len(self._fenced) < MAX_FENCED

    @property
    def _old_engine_ended(self) -> bool:
        """Whoever has not said that it is done with the old engine keeps its ports held, and nothing else: it may never
        say so, and quarantine must empty all the same."""
        return self.machine.state in (RolloverState.IDLE, RolloverState.FENCED)

    def start(self, reason: str) -> None:
        """Begin. Raises ConfigError without a way to make engines, BusyError while one is under way, and, with nothing
        changed, what making the engine raises."""
        if self._make_engine is None:
            raise ConfigError(
                "this decode side cannot make another engine", hint="Give start_decode a `renew` function."
            )
        if not self._old_engine_ended:
            raise BusyError("a rollover is under way", state=self.machine.state.name)
        if len(self._fenced) >= MAX_FENCED:
            raise BusyError("too many engines were deleted whose writers have not answered", engines=len(self._fenced))
        self._new = self._make_engine()
        self._reason = reason
        if self.machine.state is RolloverState.FENCED:
            self._fire(RolloverEvent.ALL_ACKED)
        self._fire(RolloverEvent.START)

    def start_if_possible(self, reason: str) -> None:
        """Begin unless one is under way; an engine that cannot be made now is tried again in a while."""
        if not self.possible:
            return
        receiver = self._receiver
        try:
            self.start(reason)
        except Exception as exc:
            receiver.log.warning("rollover_failed", "no engine for a rollover: %r", exc)
            if self._retry is not None:
                self._retry.cancel()
            self._retry = receiver.clock.call_later(
                receiver.config.rollover_timeout_s, lambda: self.start_if_possible(reason)
            )

    def room_ended(self) -> None:
        """A room is over: if none uses the old session any more, there is nothing to wait for."""
        if self.machine.state is RolloverState.ANNOUNCED and not self._rooms_of_old():
            self._fire(RolloverEvent.EXPIRE)

    def acked(self, link: Link, session: str) -> None:
        """A peer is done with the old session, or it is gone."""
        self._stop_awaiting(link, [fenced for fenced in self._fenced if fenced.session == session])

    def peer_gone(self, link: Link) -> None:
        self._stop_awaiting(link, self._fenced)

    def gave_up_peer(self) -> None:
        """A peer is forgotten that may be alive and writing, to the engine of now or to an old one. It will never say
        that it is done with them, so their ports must not become another engine's."""
        self._suspect |= {self._receiver.session, *(fenced.session for fenced in self._fenced)}
        if self._old is not None:
            self._suspect.add(self._old.session)

    def _stop_awaiting(self, link: Link, engines: list[_Fenced]) -> None:
        for fenced in engines:
            fenced.awaited.pop(link, None)
        link.watch(on=any(link in fenced.awaited for fenced in self._fenced))
        self._check_acked()

    def tell(self, link: Link, old: str) -> None:
        """The link came up too late for the first Rollover, and its peer knows the old session."""
        self._post(link, old, int(self._receiver.config.rollover_timeout_s * 1000))

    async def close(self) -> None:
        """The decode side stops: end what is under way. The old engine is deleted before this returns."""
        self._make_engine = None
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            await asyncio.shield(self._task)
        elif self._old is not None and self.machine.state is RolloverState.ANNOUNCED:
            await self._old.close(self._receiver.config.drain_timeout_s)
        for ports in (*(fenced.ports for fenced in self._fenced), *self._kept):
            ports.release()

    # -- inside --------------------------------------------------------------------------------------------------

    def _fire(self, event: RolloverEvent) -> None:
        for action in self.machine.fire(event):
            match action:
                case Action.ANNOUNCE:
                    self._announce()
                case Action.DELETE:
                    self._delete()
                case Action.FENCE:
                    self._fence()
                case Action.RELEASE:
                    self._release()
                case _:
                    raise IllegalTransitionError("not an action of a rollover", action=action.name)

    def _announce(self) -> None:
        assert self._new is not None, "made by start"
        receiver = self._receiver
        new, self._new = self._new, None
        self._old, old = receiver.engine, receiver.session
        receiver.use_engine(new)
        timeout = receiver.config.rollover_timeout_s
        self._tell(old, int(timeout * 1000))
        receiver.log.warning("rollover", "engine rollover from %s to %s: %s", old, new.session, self._reason)
        if self._rooms_of_old():
            self._timer = receiver.clock.call_later(timeout, self._expired)
        else:
            receiver.loop.call_soon(self._expired)

    def _expired(self) -> None:
        if self.machine.accepts(RolloverEvent.EXPIRE):
            self._fire(RolloverEvent.EXPIRE)

    def _delete(self) -> None:
        assert self._old is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for room in self._rooms_of_old():
            room.fail(TransferError("the decode's engine was rolled over", session=self._old.session))
        self._task = self._receiver.start_task(self._close_old(self._old))

    async def _close_old(self, old: Engine) -> None:
        try:
            await old.close(self._receiver.config.drain_timeout_s)
        finally:
            self._task = None
        self._fire(RolloverEvent.DELETED)

    def _fence(self) -> None:
        """Nothing can land through the old session any more: its failed leases are free."""
        assert self._old is not None
        receiver = self._receiver
        self.fences += 1
        ports = HeldPorts(receiver.loop, self._old.ports)
        awaited = {link: None for link in receiver.dialer.links.values() if link.up}
        self._fenced.append(_Fenced(self._old.session, ports, awaited))
        receiver.fenced(self._old.session)
        for link in awaited:  # one that ends without a word is noticed only while it is asked
            link.watch(on=True)
        self._tell(self._old.session, 0)
        self._check_acked()

    def _check_acked(self) -> None:
        if self.machine.state is RolloverState.FENCED and not self._fenced[-1].awaited:
            self._fire(RolloverEvent.ALL_ACKED)
        else:
            self._let_go()

    def _let_go(self) -> None:
        """The ports of every engine that nobody writes to any more."""
        done = [fenced for fenced in self._fenced if not fenced.awaited]
        self._fenced = [fenced for fenced in self._fenced if fenced.awaited]
        for fenced in done:
            if fenced.session in self._suspect:
                self._kept.append(fenced.ports)
            else:
                fenced.ports.release()

    def _release(self) -> None:
        self._let_go()
        self._old = None
        if self._new is None:
            self._receiver.check_quarantine()

    def _rooms_of_old(self) -> list[DecodeRoom]:
        old = self._old.session if self._old is not None else None
        return [r for r in self._receiver.rooms if r.session == old and r.machine.state is DecodeState.OFFERED]

    def _tell(self, old: Session, deadline_ms: int) -> None:
        for link in self._receiver.dialer.links.values():
            if link.up:
                self._post(link, old, deadline_ms)

    def _post(self, link: Link, old: str, deadline_ms: int) -> None:
        receiver = self._receiver
        link.post(Rollover(old_session=old, session=receiver.session, layout=receiver.layout, deadline_ms=deadline_ms))
