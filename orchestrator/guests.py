"""What a prefill holds its decode workers to: whose a name is, and how many of them one origin may be.

An origin is a client key, or an address where there are no keys. Loop thread only; no frames here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from orchestrator.clock import Clock
from orchestrator.config import Config
from orchestrator.hosts import host_of, is_here, is_loopback
from orchestrator.link import Link
from orchestrator.wire import Origin
from protocols.errors import RefusedError
from protocols.ids import Incarnation
from protocols.shares import Shares

MAX_SESSIONS = 4096
"""Engine sessions whose first user is remembered. The oldest goes, of the origin that named most."""
MAX_INCARNATIONS = 16384
"""Incarnations whose key is remembered, likewise."""
FRESH_S = 1.0
"""A worker that was heard of so recently is not sent away for another one, though no room of it was ever here."""


class Guests:
    """See the module."""

    def __init__(self, config: Config, clock: Clock, counters: Counter[str]) -> None:
        self._config = config
        self._clock = clock
        self._counters = counters
        self._keys: Shares[Incarnation] = Shares(MAX_INCARNATIONS)
        """The owner of an incarnation is the key that first used it."""
        self._sessions: Shares[str] = Shares(MAX_SESSIONS)
        self._users: dict[str, Incarnation] = {}
        """Which incarnation used an engine session first."""

    def is_foreign(self, peer: Incarnation, origin: Origin, link: Link | None) -> bool:
        """Whether this incarnation belongs to another key. Counted: who comes with it is an impostor."""
        key = self._keys.owner(peer) if link is None else link.origin.key
        if key is None or key == origin.key:
            return False
        self._counters["foreign_incarnations"] += 1
        return True

    def note(self, peer: Incarnation, origin: Origin) -> None:
        """This incarnation said Hello: it belongs to its key from now on."""
        if origin.key and peer not in self._keys:
            self._keys.add(origin.key, peer)

    # -- how many ------------------------------------------------------------------------------------------------

    def who_makes_place(self, origin: Origin, links: Mapping[Incarnation, Link]) -> Link | None:
        """The link that must go before this origin gets another; None when there is place. Raises RefusedError when
        there is none and nobody who could go: whose rooms are open stays, and who came just now."""
        mine = [link for link in links.values() if link.origin.name == origin.name]
        if len(mine) < self._config.max_peers_per_origin:
            if len(links) < self._config.max_peers:
                return None
            crowd = Counter(link.origin.name for link in links.values()).most_common(1)[0][0]
            mine = [link for link in links.values() if link.origin.name == crowd]
        now = self._clock.now()
        idle = [link for link in mine if not link.rooms]
        if not all(link.proven for link in mine):  # those whose rooms were here do not make place for a flood
            idle = [link for link in idle if not link.proven and now - link.last_heard >= FRESH_S]
        if not idle:
            self._counters["peers_refused"] += 1
            raise RefusedError(
                "too many decode workers",
                here=len(links),
                limit=self._config.max_peers,
                limit_per_origin=self._config.max_peers_per_origin,
            )
        self._counters["peers_sent_away"] += 1
        return min(idle, key=lambda link: link.last_heard)

    # -- sessions ------------------------------------------------------------------------------------------------

    def claim(self, session: str, peer: Incarnation, origin: Origin) -> bool:
        """Whether this incarnation is the first that used the session. Ports are random in about 2,000: names repeat.

        Nothing is written to a session for anybody else: its own worker could be running."""
        if session not in self._users:
            self.take_over(session, peer, origin)
        return self.owns(session, peer)

    def take_over(self, session: str, peer: Incarnation, origin: Origin) -> None:
        """The session is this incarnation's, whoever used it before."""
        self._users[session] = peer
        for gone in self._sessions.add(origin.name or peer.hex(), session):
            del self._users[gone]

    def owns(self, session: str, peer: Incarnation) -> bool:
        return self._users.get(session) == peer

    def owns_session_of(self, link: Link) -> bool:
        return link.hello is not None and self.owns(link.hello.session, link.peer)

    def user(self, session: str) -> Incarnation | None:
        return self._users.get(session)

    def release(self, link: Link) -> None:
        """The link is gone. A session that no room ever used is nobody's again."""
        session = link.hello.session if link.hello is not None else ""
        if not link.proven and self.owns(session, link.peer):
            self._sessions.remove(session)
            del self._users[session]


def check_session(session: str, origin: Origin) -> None:
    """Raise RefusedError for a loopback session of a worker that is not on this host: a write to it would go to
    whoever listens there here."""
    if origin.address and is_loopback(session) and not is_here(origin.address):
        raise RefusedError(
            "the engine's session is a loopback address, and the worker is on another host",
            session=session[:100],
            host=host_of(session)[:100],
            peer=origin.address,
            hint="Start its engine on an address that this host can reach.",
        )
