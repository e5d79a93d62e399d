"""The prefill face: what a prefill worker calls, from any thread.

Nothing here waits on the network but `wait` and `finished`, and nothing raises because of a transfer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from functools import partial

from orchestrator.chunk import ChunkData, ChunkSpec, as_transfer_error, validate
from orchestrator.forward import ForwardPass
from orchestrator.inbox import Inbox
from orchestrator.outcome import Outcome, RoomStatus
from orchestrator.sender import Sender
from orchestrator.trace import TransferResult
from protocols.errors import AbortedError, ClosedError, LocalError
from protocols.ids import RoomKey


class Prefill:
    """Thread-safe. Made by `EmbeddedLoop.start_prefill` or `Node`; every method may be called from any thread."""

    def __init__(self, sender: Sender, inbox: Inbox, loop_thread: int) -> None:
        self._sender = sender
        self._inbox = inbox
        self._loop_thread = loop_thread

    @property
    def address(self) -> str:
        """Where decode workers dial: ``tcp://HOST:PORT``."""
        return self._sender.address

    def begin_forward(self, chunks: Iterable[ChunkSpec]) -> ForwardPass:
        """Start one forward pass that makes these chunks final.

        A chunk that was registered before is the same chunk (handing in the same `ChunkSpec` costs a dictionary
        lookup); as long as none of its layers has fired it moves to this pass. A chunk that cannot be taken is listed
        in ``ForwardPass.refused``; if it contradicts the layout or its room, the room fails. Costs a few microseconds
        a new chunk; never raises because of a transfer.
        """
        taken: list[ChunkData] = []
        refused: list[str] = []
        layout = self._sender.layout
        for spec in chunks:
            key = None
            try:
                key = RoomKey(spec.room, spec.gen)
                outcome = self._sender.rooms.open(key)
                known = outcome.specs.get(id(spec))
                data = known[1] if known is not None else validate(spec, layout.page_size, layout.num_pages)
            except Exception as exc:
                refused.append(f"{spec!r}: {exc}"[:500])
                self._refuse(key, exc)
                continue
            if outcome.status.ended:
                refused.append(f"{spec.key}: the room has ended: {outcome.error or 'success'}")
                continue
            outcome.specs[id(spec)] = (spec, data)
            taken.append(data)
        sender = self._sender
        pages = sum(len(data.pages) for data in taken)
        forward = ForwardPass(
            sender.planner.plan_for(pages, len(taken)),
            sender.events,
            self._inbox,
            sender.clock,
            sender.watch,
            bool(taken),
            partial(sender.planner.observe, pages, len(taken)),
        )
        forward.refused = refused
        if taken and not self._put(self._sender.register, forward, taken):
            for data in taken:
                self._bury(data.key.room_key)
                forward.refused.append(f"{data.key}: the loop has ended")
        return forward

    def poll(self, room: int, gen: int = 0) -> RoomStatus:
        """Where the room stands. Raises UnknownRoomError. A few hundred nanoseconds, no lock."""
        return self._sender.rooms.find(RoomKey(room, gen)).status

    def result(self, room: int, gen: int = 0) -> TransferResult:
        """What became of a room that has ended. Raises UnknownRoomError, and LocalError while it has not ended.

        After a failure the bytes are None until the room has drained (`source_free`).
        """
        return result_of(self._sender.rooms.find(RoomKey(room, gen)))

    def source_free(self, room: int, gen: int = 0) -> bool:
        """True once no engine task reads the room's source pages any more and none will: they may be reused.

        Separate from the outcome: a failed room drains first. Raises UnknownRoomError.
        """
        return self._sender.rooms.find(RoomKey(room, gen)).units_free

    def on_source_free(self, room: int, gen: int, callback: Callable[[], None]) -> None:
        """Call back once, on the loop thread, when `source_free` turns true (now, if it is). Keep it short."""
        self._sender.rooms.find(RoomKey(room, gen)).on_units_free(callback)

    def abort(self, room: int, gen: int = 0, reason: str = "aborted by the prefill worker") -> bool:
        """End the room: visible to every thread before this returns; no submission starts after it.

        Legal in every state and idempotent. False if the room had ended before. A room that is not known yet is ended
        too: what comes later for it is turned away.
        """
        key = RoomKey(room, gen)
        error = AbortedError(reason, origin="prefill")
        outcome = self._sender.rooms.open(key)
        first = outcome.fail(error)
        if not self._put(self._carry_out_abort, key, error):
            self._bury(key)
        return first

    def wait(self, room: int, gen: int = 0, timeout: float | None = None) -> TransferResult:
        """Block this thread until the room has ended (seconds). Raises TimeoutError, UnknownRoomError, and LocalError
        on the loop thread, which must not block."""
        return wait_for(self._sender.rooms.find(RoomKey(room, gen)), self._loop_thread, timeout)

    async def finished(self, room: int, gen: int = 0) -> TransferResult:
        """The same as a coroutine, on any loop. Cancelling it leaves the room alone."""
        return await until_ended(self._sender.rooms.find(RoomKey(room, gen)))

    # -- inside --------------------------------------------------------------------------------------------------

    def _refuse(self, key: RoomKey | None, exc: Exception) -> None:
        if key is None:
            return
        error = as_transfer_error(exc)
        try:
            self._sender.rooms.open(key).fail(error)
            if not self._put(self._sender.refuse, key, error):
                self._bury(key)
        except (TypeError, ValueError):
            return  # not even a key: it is in `refused`, and no room waits for it

    def _carry_out_abort(self, key: RoomKey, error: AbortedError) -> None:
        if self._sender.rooms.live(key) is None and self._sender.rooms.verdict(key) is None:
            self._sender.refuse(key, error)
        self._sender.abort(key, error)

    def _put(self, callback: Callable[..., object], *args: object) -> bool:
        """False once the loop has ended: it failed every room that it knew."""
        try:
            self._inbox.put(callback, *args)
        except ClosedError:
            return False
        return True

    def _bury(self, key: RoomKey) -> None:
        """The loop has ended. A room that it never heard of ends here, and nothing ever read its pages."""
        outcome = self._sender.rooms.open(key)
        outcome.fail(AbortedError("the loop has ended", origin="prefill"))
        if self._sender.rooms.live(key) is None:
            outcome.free_units()


def result_of(outcome: Outcome) -> TransferResult:
    """The result of an ended room; a failed one that still drains has no byte count yet."""
    if not outcome.status.ended:
        raise LocalError("the room has not ended", room=str(outcome.key), status=outcome.status.name)
    if outcome.result is not None:
        return outcome.result
    return TransferResult(
        key=outcome.key,
        ok=False,
        error=outcome.error,
        bytes=None,
        blocks=None,
        chunks=0,
        layers_fired=0,
        layers_fallback=0,
        timing={},
    )


def wait_for(outcome: Outcome, loop_thread: int, timeout: float | None) -> TransferResult:
    """Block until the outcome is decided."""
    if threading.get_ident() == loop_thread:
        raise LocalError("the loop thread must not block", hint="Await it instead.")
    try:
        outcome.future().result(timeout)
    except concurrent.futures.TimeoutError:
        raise TimeoutError(f"room {outcome.key} is still {outcome.status.name} after {timeout} s") from None
    return result_of(outcome)


async def until_ended(outcome: Outcome) -> TransferResult:
    """Await the outcome on the running loop, whichever that is."""
    await asyncio.shield(asyncio.wrap_future(outcome.future()))
    return result_of(outcome)
