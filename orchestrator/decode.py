"""The decode face: what a decode worker calls, from any thread."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from orchestrator.decode_room import Expectation
from orchestrator.hosts import check_address
from orchestrator.inbox import Inbox
from orchestrator.link import Link
from orchestrator.outcome import Outcome, RoomStatus
from orchestrator.prefill import result_of, until_ended, wait_for
from orchestrator.receiver import Quarantined, Receiver
from orchestrator.trace import TransferResult
from protocols.blocks import check_units, page_array
from protocols.errors import (
    AbortedError,
    BrokenPeerError,
    ClosedError,
    ConfigError,
    KvferryError,
    LayoutError,
    LocalError,
)
from protocols.ids import MAX_GENERATION, MAX_ROOM, RoomKey
from protocols.messages import Hello

T = TypeVar("T")


class RoomHandle:
    """One expected room. Thread-safe; ``await handle`` works on any loop."""

    def __init__(self, outcome: Outcome, decode: Decode) -> None:
        self._outcome = outcome
        self._decode = decode

    @property
    def key(self) -> RoomKey:
        return self._outcome.key

    def poll(self) -> RoomStatus:
        """Where the room stands. No lock."""
        return self._outcome.status

    def result(self) -> TransferResult:
        """What became of it. Raises LocalError while it has not ended."""
        return result_of(self._outcome)

    def units_free(self) -> bool:
        """True once pages, aux slot and state rows may be given to another room. With success at once; after a failure
        only when every prefill rank is quiet about them, or a fence made them so."""
        return self._outcome.units_free

    def on_units_free(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop thread, when `units_free` turns true (now, if it is). Keep it short."""
        self._outcome.on_units_free(callback)

    def abort(self, reason: str = "aborted by the decode worker") -> bool:
        """End the room and tell every prefill rank until each has acknowledged. Visible to every thread before this
        returns; legal in every state, idempotent. False if it had ended before."""
        return self._decode.abort(self.key.room, self.key.gen, reason)

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Block this thread until the room has ended (seconds). Raises TimeoutError; LocalError on the loop thread."""
        return wait_for(self._outcome, self._decode.loop_thread, timeout)

    def __await__(self) -> Generator[Any, None, TransferResult]:
        """Cancelling the wait leaves the room alone."""
        return until_ended(self._outcome).__await__()

    def __repr__(self) -> str:
        return f"<RoomHandle {self.key} {self._outcome.status.name}>"


class Decode:
    """Thread-safe. Made by `EmbeddedLoop.start_decode` or `Node`."""

    def __init__(self, receiver: Receiver, inbox: Inbox, loop_thread: int) -> None:
        self._receiver = receiver
        self._inbox = inbox
        self.loop_thread = loop_thread

    def expect(
        self,
        room: int,
        gen: int,
        peers: Sequence[str],
        pages: object,
        *,
        total_tokens: int,
        prefix_tokens: int = 0,
        aux_slot: int | None = None,
        state_rows: object = None,
        destinations: int = 1,
        dummy_peers: Sequence[str] = (),
    ) -> RoomHandle:
        """Lease units to a room and offer them to its prefill ranks.

        ``pages[i]`` will hold page ``prefix_tokens / page_size + i`` of the request; ``total_tokens`` is the prompt's
        length. ``peers`` are the control addresses of the ranks that write, ``dummy_peers`` of ranks that must only
        know of the room; without any the room asks for no transfer and succeeds at once. ``destinations`` is how many
        decode ranks offer this room to each prefill rank.

        Raises ConfigError, LayoutError or MismatchError for arguments that cannot be right, BusyError for a room that
        is live or ended recently (mint a new generation). Units under another lease, and peers that refuse or are not
        there, fail the room: see the handle.
        """
        layout = self._receiver.layout
        if not (0 <= room <= MAX_ROOM and 0 <= gen <= MAX_GENERATION):
            raise ConfigError("a room has 63 bits and a generation 64", room=room, gen=gen)
        for address in (*peers, *dummy_peers):
            check_address(address)
        if len({*peers, *dummy_peers}) != len(peers) + len(dummy_peers):
            raise ConfigError("an address is named twice", peers=list(peers), dummy_peers=list(dummy_peers))
        if prefix_tokens % layout.page_size or not 0 <= prefix_tokens <= total_tokens:
            raise LayoutError(
                "a prefix is a whole number of pages and not longer than the request",
                prefix_tokens=prefix_tokens,
                total_tokens=total_tokens,
                page_size=layout.page_size,
            )
        page_list = page_array(pages)
        rows = page_array(state_rows, "state rows")
        needed = -(-total_tokens // layout.page_size) - prefix_tokens // layout.page_size
        if peers and len(page_list) != needed:
            raise LayoutError("the pages do not hold the request", pages=len(page_list), needed=needed)
        check_units(page_list, layout.num_pages, "pages")
        check_units(rows, layout.units_of("state"), "state rows")
        check_units(page_array(None if aux_slot is None else [aux_slot]), layout.units_of("aux"), "aux slots")
        expectation = Expectation(
            peers=tuple(peers),
            dummy_peers=tuple(dummy_peers),
            pages=page_list,
            prefix_tokens=prefix_tokens,
            total_tokens=total_tokens,
            aux_slot=aux_slot,
            state_rows=rows,
            destinations=destinations,
        )
        outcome = self._receiver.rooms.open(RoomKey(room, gen), exclusive=True)
        try:
            self._inbox.put(self._receiver.expect, outcome, expectation)
        except ClosedError as exc:
            outcome.fail(AbortedError("the loop has ended"))
            outcome.free_units()
            raise exc
        return RoomHandle(outcome, self)

    def abort(self, room: int, gen: int = 0, reason: str = "aborted by the decode worker") -> bool:
        """See `RoomHandle.abort`. Raises UnknownRoomError for a room that was never expected here."""
        key = RoomKey(room, gen)
        outcome = self._receiver.rooms.find(key)
        error = AbortedError(reason, origin="decode")
        first = outcome.fail(error)
        try:
            self._inbox.put(self._receiver.abort, key, error)
        except ClosedError:
            pass  # the loop ended and failed every room
        return first

    def roll_over(self, reason: str = "an operator asked") -> None:
        """Begin an engine rollover, which frees everything in quarantine once the old engine is deleted. Returns when
        it has begun. Raises ConfigError without a ``renew`` function, BusyError while one is under way."""
        self._call(self._receiver.rollover.start, reason)

    def quarantine(self) -> list[Quarantined]:
        """Units that are not free although their room has ended: which room, why, since when."""
        return self._call(self._receiver.quarantine)

    def _call(self, function: Callable[..., T], *args: object) -> T:
        """Run on the loop thread and return what it returns or raises; from that thread itself, at once."""
        if threading.get_ident() == self.loop_thread:
            return function(*args)
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(function(*args))
            except Exception as exc:
                answer.set_exception(exc)

        self._inbox.put(run)
        return answer.result()

    def check(self, address: str, timeout: float | None = None) -> Hello:
        """Connect to a prefill rank and return what it says of itself. Blocks this thread (seconds).

        Raises RefusedError naming the fields that differ, BrokenPeerError when nobody answers, ConfigError for an
        impossible address, LocalError on the loop thread.
        """
        check_address(address)
        if threading.get_ident() == self.loop_thread:
            raise LocalError("the loop thread must not block")
        answer: concurrent.futures.Future[Hello] = concurrent.futures.Future()

        def up(link: Link) -> None:
            assert link.hello is not None
            answer.set_result(link.hello)

        def failed(error: KvferryError) -> None:
            answer.set_exception(error)

        self._inbox.put(self._receiver.dialer.when_up, address, up, failed)
        limit = timeout if timeout is not None else self._receiver.config.connect_timeout_s + 1.0
        try:
            return answer.result(limit)
        except concurrent.futures.TimeoutError:
            raise BrokenPeerError("the prefill worker does not answer", address=address, seconds=limit) from None
