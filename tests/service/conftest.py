from __future__ import annotations

import pytest

from orchestrator.chunk import Chunk
from orchestrator.prefill_room import PrefillRoom
from tests.support import properties

properties.load()


@pytest.fixture
def concluded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(room, start token) of every chunk that concludes, in order."""
    order: list[tuple[int, int]] = []
    real = PrefillRoom.concluded

    def spy(room: PrefillRoom, chunk: Chunk) -> None:
        order.append((room.key.room, chunk.key.start_token))
        real(room, chunk)

    monkeypatch.setattr(PrefillRoom, "concluded", spy)
    return order
