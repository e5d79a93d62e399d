"""Offers of rooms that nobody has registered yet: kept, within bounds that peers share fairly. Loop thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.config import Config
from orchestrator.destination import Destination
from protocols.errors import TransferError
from protocols.ids import Incarnation, RoomKey
from protocols.shares import Shares

if TYPE_CHECKING:
    from orchestrator.prefill_room import PrefillRoom
    from orchestrator.registry import Registry


class KeptOffers:
    """See the module. Who floods it pushes out the oldest of its own; their rooms fail, and their offerer is told."""

    def __init__(self, config: Config, rooms: Registry[PrefillRoom]) -> None:
        self._rooms = rooms
        self._offers: Shares[tuple[RoomKey, Incarnation]] = Shares(config.max_kept_offers, config.max_kept_pages)

    def __len__(self) -> int:
        return len(self._offers)

    def keep(self, room: PrefillRoom, destination: Destination) -> None:
        """An offer has come; unless its room is registered, it is kept."""
        if room.chunks:
            return
        link = destination.link
        weight = len(destination.pages) + len(destination.state_rows)
        for key, _ in self._offers.add(link.account, (room.key, link.peer), weight):
            fallen = self._rooms.live(key)
            if fallen is not None:
                fallen.fail(TransferError("too many offers are waiting for their prefill", kept=len(self._offers)))

    def release(self, room: PrefillRoom) -> None:
        """The room is registered, or has ended."""
        for peer in room.destinations:
            self._offers.remove((room.key, peer))
