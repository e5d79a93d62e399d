"""The forward pass: what the engine's forward thread touches.

`begin_forward` returns a handle that owns its chunks; hooks belong to the handle, so a later forward can never fire
into an older chunk (A6). On the forward thread a hook appends an int; at a group boundary it records one event and
deposits it. Nothing here waits, and nothing raises because of a transfer (V6).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from orchestrator.clock import Clock
from orchestrator.cuda_events import Event, EventSource
from orchestrator.inbox import Inbox
from orchestrator.planner import GroupPlan
from protocols.errors import ClosedError, KvferryError
from protocols.machines import FORWARD_PASS, Machine, PassEvent, PassState

if TYPE_CHECKING:
    from orchestrator.chunk import Chunk

log = logging.getLogger("kvferry.forward")


class Group:
    """Layers that fired together, behind one event; shared by every chunk of the pass. Loop thread."""

    __slots__ = ("fired_at", "layers", "ready", "ready_at")

    def __init__(self, layers: tuple[int, ...], fired_at: float, ready: asyncio.Future[None]) -> None:
        self.layers = layers
        self.fired_at = fired_at
        self.ready = ready
        """Resolves when the layers are written. Await it through `asyncio.shield`: it is shared."""
        self.ready_at: float | None = None


class ForwardPass:
    """One model forward on the prefill worker.

    Use it as a context manager around the forward: leaving it ends the pass, leaving it by an exception discards it.
    `layer_end`, `end` and `discard` belong to the forward thread, one thread at a time; none blocks or raises because
    of a transfer. Without chunks every call does nothing.
    """

    def __init__(
        self,
        plan: GroupPlan,
        events: EventSource,
        inbox: Inbox,
        clock: Clock,
        watch: Callable[[Event], asyncio.Future[None]],
        has_chunks: bool,
        measured: Callable[[float, int], object],
    ) -> None:
        self._fired: list[int] = []
        self._closed_a_group = False
        self._closing = plan.closing if has_chunks else frozenset()
        self._has_chunks = has_chunks
        self._events = events
        self._inbox = inbox
        self._clock = clock
        self._watch = watch
        self._measured = measured
        self._first_group: float | None = None
        self._last_group = 0.0
        self._layers_since = 0
        self._machine = Machine(FORWARD_PASS, PassState.OPEN)
        self.refused: list[str] = []
        """Chunks that were not taken, each with the reason: their rooms have ended, or are invalid."""
        self.events_recorded = 0
        self.chunks: list[Chunk] = []
        """Loop thread: the chunks that take their layers from this pass."""

    # -- forward thread ------------------------------------------------------------------------------------------

    def layer_end(self, layer: int) -> None:
        """The layer's KV is enqueued on the current stream; its pages of these chunks are not rewritten afterwards."""
        self._fired.append(layer)
        if layer in self._closing:
            self._close_group()

    def end(self) -> None:
        """The forward is enqueued to its end, draft layers and aux data included: unfired layers go behind one event.

        Idempotent; does nothing after `discard`.
        """
        if self._machine.state is not PassState.OPEN:
            return
        self._machine.fire(PassEvent.END)
        if self._has_chunks:
            self._deposit(self._on_end, tuple(self._fired), self._record(), self._clock.now())
        self._fired = []

    def discard(self, reason: str = "the forward pass was thrown away") -> None:
        """Give the chunks back: to a later pass if none of their layers has fired, else their rooms fail.

        Idempotent; does nothing after `end`.
        """
        if self._machine.state is not PassState.OPEN:
            return
        self._machine.fire(PassEvent.DISCARD)
        if self._has_chunks:
            self._deposit(self._on_discard, reason)
        self._fired = []

    def __enter__(self) -> ForwardPass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.discard(f"the forward raised {type(error).__name__}: {error}")

    def _close_group(self) -> None:
        self._closed_a_group = True
        layers = tuple(self._fired)
        self._fired = []
        self._deposit(self._on_group, layers, self._record(), self._clock.now())

    def _record(self) -> Event | Exception:
        try:
            event = self._events.record()
            self.events_recorded += 1
            return event
        except Exception as exc:
            return exc

    def _deposit(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._inbox.put(callback, *args)
        except ClosedError:
            log.debug("a hook fired after the loop had ended")

    # -- loop thread ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> PassState:
        return self._machine.state

    @property
    def has_fired(self) -> bool:
        """A hook ran: this is the pass that runs, whatever batch is formed meanwhile."""
        return self._closed_a_group or bool(self._fired)

    def detach(self, chunk: Chunk) -> None:
        if chunk in self.chunks:
            self.chunks.remove(chunk)

    def _on_group(self, layers: tuple[int, ...], event: Event | Exception, at: float) -> None:
        try:
            group = self._group(layers, event, at)
        except Exception as exc:
            for chunk in list(self.chunks):
                chunk.setup_failed(exc)
            return
        if self._first_group is None:
            self._first_group = at
        else:
            self._layers_since += len(layers)
            self._last_group = at
        for chunk in list(self.chunks):
            chunk.fire(group)

    def _on_end(self, leftover: tuple[int, ...], event: Event | Exception, at: float) -> None:
        chunks, self.chunks = self.chunks, []
        if self._first_group is not None and self._layers_since:
            self._measured(self._last_group - self._first_group, self._layers_since)
        try:
            group = self._group(leftover, event, at)
        except Exception as exc:
            for chunk in chunks:
                chunk.fail(KvferryError(f"the end of the forward cannot be awaited: {exc}"))
            return
        for chunk in chunks:
            chunk.forward_ended(group)

    def _on_discard(self, reason: str) -> None:
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            chunk.given_back(reason)

    def _group(self, layers: tuple[int, ...], event: Event | Exception, at: float) -> Group:
        """Raises what recording the event raised, or watching it."""
        if isinstance(event, Exception):
            raise event
        group = Group(layers, at, self._watch(event))

        def stamp(_: asyncio.Future[None]) -> None:
            if group.ready_at is None:
                group.ready_at = self._clock.now()

        group.ready.add_done_callback(stamp)
        return group


class LayerNotifier:
    """For engines with one global hook: points at the current pass. A hook without a pass does nothing.

    ``notifier.layer_end`` is the function to install; the current pass is set by `enter` and cleared by `leave`.
    """

    def __init__(self) -> None:
        self._pass: ForwardPass | None = None
        self._lock = threading.Lock()

    def layer_end(self, layer: int) -> None:
        current = self._pass
        if current is not None:
            current.layer_end(layer)

    def enter(self, forward: ForwardPass) -> None:
        """Hooks go to this pass from now on. Raises KvferryError if another pass is still current."""
        with self._lock:
            if self._pass is not None and self._pass is not forward and self._pass.state is PassState.OPEN:
                raise KvferryError("another forward pass is still open", hint="End or discard it first.")
            self._pass = forward

    def leave(self) -> None:
        with self._lock:
            self._pass = None
