"""Virtual time: an asyncio event loop whose clock jumps to the next timer when nothing is ready. No socket, no thread.

Determinism: what runs next, and which of two timers that are due at one moment comes first, is drawn from one seeded
generator, and time moves only when nothing can run. The same seed over the same code gives the same run, as long as
the code itself reads no other clock or randomness and iterates over no set of objects whose hash is their address.

The callbacks of one simulated process belong to one :class:`Domain`. A domain can be held (the process is stopped:
its callbacks wait, its timers turn due) and killed (they never run). Times are virtual seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, TypeVar, TypeVarTuple, cast

from orchestrator.clock import Timer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Order = Literal["domains", "any"]
"""Which ready callback runs next: the oldest of a domain drawn at random, as separate processes interleave; or any at
all, which no real loop does but correct code must bear."""

START = 1000.0
"""Where virtual time begins, so that no stamp is falsely zero."""


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: whoever waits waits for ever. The text names every waiting task."""


class BudgetError(RuntimeError):
    """The run used up its virtual time or its steps."""


class Domain:
    """One simulated process as the loop sees it: callbacks that live, stop and die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = False
        self.dead = False
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(_domain.set, self)

    def __repr__(self) -> str:
        state = "dead" if self.dead else "held" if self.held else "alive"
        return f"<Domain {self.name} {state}, {len(self.ready)} ready>"


_domain: contextvars.ContextVar[Domain | None] = contextvars.ContextVar("kvferry_domain", default=None)


def current_domain() -> Domain | None:
    """The domain whose callback is running; None outside of any."""
    return _domain.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. Close it, or use `run_virtual`, when done: tasks of killed domains are closed only then."""

    def __init__(
        self,
        seed: int = 0,
        *,
        order: Order = "domains",
        max_virtual_s: float = 3600.0,
        max_steps: int = 5_000_000,
    ) -> None:
        """``max_virtual_s`` and ``max_steps`` bound the whole run; beyond either it raises BudgetError."""
        super().__init__()
        self.set_debug(False)
        self.order: Order = order
        self.steps = 0
        self.unhandled: list[str] = []
        """What reached the loop's exception handler, in words."""
        self.reporters: list[Callable[[], Iterable[str]]] = []
        """Asked for lines of a deadlock's report: rooms, leases, whatever may be waiting."""
        self._now = START
        self._rng = random.Random(seed)
        self._max_time = START + max_virtual_s
        self._max_steps = max_steps
        self._world = Domain("world")
        self._domains: dict[Domain, None] = {self._world: None}
        """Those that ever had a task, in the order of their first."""
        self._runnable: list[Domain] = []
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._cancelled = 0
        self._count = itertools.count()
        self._finished = False
        self.set_exception_handler(lambda _, context: self._note(context))
        self.set_task_factory(self._make_task)

    # -- time ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds; starts at `START`."""
        return self._now

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """The timers that are set and not cancelled, soonest first, those of killed domains left out."""
        return [
            entry[3]
            for entry in sorted(self._timers)
            if not entry[3].cancelled() and not self._domain_of(entry[3]).dead
        ]

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        cast(Any, handle)._scheduled = True
        if not self._finished:
            heapq.heappush(self._timers, (when, self._rng.random(), next(self._count), handle))
        return handle

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._finished:
            self._enqueue(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > 256 and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[3].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    # -- domains -------------------------------------------------------------------------------------------------

    def hold(self, domain: Domain) -> None:
        """Stop the process: nothing of it runs until `resume`, and time goes on."""
        domain.held = True
        if domain in self._runnable:
            self._runnable.remove(domain)

    def resume(self, domain: Domain) -> None:
        """Continue the process: what became due meanwhile runs now."""
        domain.held = False
        if domain.ready and domain not in self._runnable and not domain.dead:
            self._runnable.append(domain)

    def kill(self, domain: Domain) -> None:
        """End the process without a word: nothing of it runs again, not even a ``finally``."""
        domain.dead = True
        domain.ready.clear()
        if domain in self._runnable:
            self._runnable.remove(domain)

    def spawn(self, coroutine: Coroutine[Any, Any, T], domain: Domain | None, name: str) -> asyncio.Task[T]:
        """A task of that domain (None: of nobody, the world)."""
        return self.create_task(coroutine, name=name, context=domain.context if domain is not None else None)

    # -- running -------------------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        self._take_due()
        while not self._runnable:
            self._jump()
            self._take_due()
        self.steps += 1
        if self.steps > self._max_steps:
            raise BudgetError(self._report(f"more than {self._max_steps} steps"))
        handle = self._pick()
        if not handle.cancelled():
            handle._run()

    def _pick(self) -> asyncio.Handle:
        runnable = self._runnable
        at = int(self._rng.random() * len(runnable)) if len(runnable) > 1 else 0
        domain = runnable[at]
        ready = domain.ready
        if self.order == "any" and len(ready) > 1:
            nth = int(self._rng.random() * len(ready))
            ready.rotate(-nth)
            handle = ready.popleft()
            ready.rotate(nth)
        else:
            handle = ready.popleft()
        if not ready:
            del runnable[at]
        return handle

    def _enqueue(self, handle: asyncio.Handle) -> None:
        domain = self._domain_of(handle)
        if domain.dead:
            return
        if not domain.ready and not domain.held:
            self._runnable.append(domain)
        domain.ready.append(handle)

    def _take_due(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[3]
            cast(Any, handle)._scheduled = False
            if handle.cancelled():
                self._cancelled -= 1
            else:
                self._enqueue(handle)

    def _jump(self) -> None:
        timers = self._timers
        while timers and (timers[0][3].cancelled() or self._domain_of(timers[0][3]).dead):
            handle = heapq.heappop(timers)[3]
            cast(Any, handle)._scheduled = False
            if handle.cancelled():
                self._cancelled -= 1
        if not timers:
            raise DeadlockError(self._report("deadlock: nothing is ready and no timer is set"))
        self._now = max(self._now, timers[0][0])
        if self._now > self._max_time:
            raise BudgetError(self._report(f"virtual time ran out at {self._now - START:.3f} s"))

    # -- reports -------------------------------------------------------------------------------------------------

    def waiting(self) -> list[str]:
        """Every task that is not done, with what it waits for (innermost first), and what the reporters say."""
        lines = [
            f"{domain.name}: {task.get_name()} waits at {' < '.join(_stack(task)) or 'its start'}"
            for domain in self._domains
            if not domain.dead
            for task in domain.tasks
            if not task.done()
        ]
        for reporter in self.reporters:
            lines += reporter()
        return lines

    def failures(self) -> list[str]:
        """What reached the exception handler, and tasks that died of something that nobody asked for."""
        died = [
            f"{domain.name}: {task.get_name()} died: {task.exception()!r}"
            for domain in self._domains
            for task in domain.tasks
            if task.done() and not task.cancelled() and cast(Any, task)._log_traceback
        ]
        return [*self.unhandled, *died]

    def _report(self, what: str) -> str:
        held = [domain.name for domain in self._domains if domain.held]
        head = f"{what} (virtual time {self._now - START:.3f} s, {self.steps} steps"
        return "\n  ".join([head + (f", held: {', '.join(held)})" if held else ")"), *self.waiting()])

    def _note(self, context: dict[str, Any]) -> None:
        if not self._finished:
            exc = context.get("exception")
            self.unhandled.append(f"{context.get('message')}: {type(exc).__name__}: {exc}" if exc else str(context))

    # -- tasks and the end ---------------------------------------------------------------------------------------

    def _make_task(
        self, _: Any, coroutine: Any, context: contextvars.Context | None = None, **kwargs: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, context=context, **kwargs)
        domain = (context.get(_domain) if context is not None else _domain.get()) or self._world
        if len(domain.tasks) > 64:
            domain.tasks = [other for other in domain.tasks if not other.done()]
        domain.tasks.append(task)
        self._domains[domain] = None
        return task

    def _domain_of(self, handle: asyncio.Handle) -> Domain:
        context: contextvars.Context = cast(Any, handle)._context
        return context.get(_domain) or self._world

    def close(self) -> None:
        """End the run: what still waits is closed without a word, whatever its ``finally`` does. Idempotent."""
        if self.is_closed():
            return
        self._finished = True
        for domain in self._domains:
            for task in domain.tasks:
                if not task.done():
                    cast(Any, task)._log_destroy_pending = False
                    coroutine = task.get_coro()
                    with contextlib.suppress(BaseException):
                        if coroutine is not None:
                            cast(Any, coroutine).close()
            domain.tasks.clear()
            domain.ready.clear()
        self._timers.clear()
        self._runnable.clear()
        super().close()

    def _write_to_self(self) -> None:
        return None


def _stack(task: asyncio.Task[Any]) -> list[str]:
    """Where each coroutine of the chain stands, innermost first."""
    frames: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames[::-1]


class SimClock:
    """The injected clock on a virtual loop. ``offset`` seconds make each process's clock its own, as on real hosts."""

    def __init__(self, loop: VirtualLoop, offset: float = 0.0) -> None:
        self._loop = loop
        self._offset = offset

    def now(self) -> float:
        return self._loop.time() + self._offset

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        return self._loop.call_later(delay, callback)


def run_virtual(
    main: Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    seed: int = 0,
    *,
    order: Order = "domains",
    max_virtual_s: float = 3600.0,
    max_steps: int = 5_000_000,
) -> T:
    """Run ``main(loop)`` on a fresh loop to its end and close the loop. Raises what it raises, DeadlockError when all
    wait for ever, and BudgetError."""
    loop = VirtualLoop(seed, order=order, max_virtual_s=max_virtual_s, max_steps=max_steps)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()
