"""The chunk coroutine: destination → layer groups → unfired rest → landed → conclude. Read it top to bottom.

It owns no policy. Block plans come from `protocols.planning`, permits from the lanes, outcomes from the engine. One
coroutine serves every way a chunk can go: layer-wise, layer-wise with a fallback for unfired layers, and monolithic
(layer-wise off, degraded, or a destination so late that every layer is there already).

It may be cancelled at any await, and is, when its room fails: what it handed over belongs to the lanes and is drained
there, so nothing depends on it being here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.chunk import Chunk, as_transfer_error
from protocols.errors import TransferError
from protocols.machines import ChunkEvent, ChunkState

if TYPE_CHECKING:
    from orchestrator.prefill_room import PrefillRoom


async def run_chunk(chunk: Chunk, room: PrefillRoom) -> None:
    """Carry one chunk to its conclusion, or fail its room with the first cause. Never raises."""
    try:
        await room.all_offered()
        await _send_groups(chunk, room)
        await _send_rest(chunk, room)
        await chunk.settled()
        chunk.machine.fire(ChunkEvent.LAND)
        await chunk.turn()
        await room.prove(chunk)
        chunk.machine.fire(ChunkEvent.CONCLUDE)
        room.concluded(chunk)
    except asyncio.CancelledError:
        room.fail(TransferError("the transfer was cancelled", chunk=str(chunk.key)))
    except Exception as exc:
        room.fail(as_transfer_error(exc, chunk=str(chunk.key)))


async def _send_groups(chunk: Chunk, room: PrefillRoom) -> None:
    """Plan, then each group as soon as its event has completed: one hand-over a destination. What goes wrong before a
    byte has left sends the chunk whole (A10); that the sides do not mean the same pages is no such error."""
    try:
        room.check_chunk(chunk)
        while (group := await chunk.next_group()) is not None:
            fresh = tuple(layer for layer in dict.fromkeys(group.layers) if layer not in chunk.taken)
            chunk.taken |= frozenset(fresh)
            room.hand_over(chunk, "group", room.hooked_buffers(fresh), group)
    except TransferError:
        raise
    except Exception as exc:
        if chunk.machine.state not in (ChunkState.REGISTERED, ChunkState.DEGRADED):
            raise
        chunk.taken = frozenset()
        chunk.setup_failed(exc)


async def _send_rest(chunk: Chunk, room: PrefillRoom) -> None:
    """What has no hook, or whose hook never fired, in one batch behind the end event; aux and state with the last."""
    end = await chunk.forward_end()
    await asyncio.shield(end.ready)
    if chunk.machine.state is ChunkState.DEGRADED:
        room.check_chunk(chunk)
    rest = room.buffers_without(chunk.taken)
    if rest:
        chunk.fallback = frozenset(buffer.layer for buffer in rest)
        room.hand_over(chunk, "fallback" if chunk.taken else "whole", rest, end)
    if chunk.data.last:
        room.hand_over_aux(chunk, end)
