"""Coroutines whose suspensions are counted, so that one of them can be chosen and its task cancelled there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from orchestrator.testing.virtual import VirtualLoop


@dataclass(slots=True)
class Walk:
    """One task of a run: which one, what it runs, how often it has suspended."""

    ordinal: int
    name: str
    suspensions: int = 0

    @property
    def where(self) -> str:
        return f"{self.name}#{self.ordinal}"


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine like the one within; `on_suspend` hears of each suspension, before the task waits."""

    def __init__(self, inner: Coroutine[Any, Any, Any], on_suspend: Callable[[], None]) -> None:
        self._inner: Any = inner
        self._on_suspend = on_suspend

    def send(self, value: Any) -> Any:
        awaited = self._inner.send(value)
        self._on_suspend()
        return awaited

    def throw(self, *args: Any) -> Any:
        awaited = self._inner.throw(*args)
        self._on_suspend()
        return awaited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, None, Any]:
        raise TypeError("a task's own coroutine is not awaited")

    @property
    def cr_frame(self) -> Any:
        return self._inner.cr_frame

    @property
    def cr_await(self) -> Any:
        return self._inner.cr_await


class Steps:
    """Counts the suspensions of every task that a loop makes, and cancels one of them at one of its suspensions.

    ``at`` is (ordinal of the task, number of the suspension from 1). ``product`` are the tasks whose coroutine stands
    in the product's own modules.
    """

    def __init__(self, loop: VirtualLoop, at: tuple[int, int] | None = None) -> None:
        self.product: list[Walk] = []
        self.hit: Walk | None = None
        self._loop = loop
        self._at = at
        self._make: Callable[..., asyncio.Task[Any]] = loop._make_task
        loop.set_task_factory(self._task)

    def _task(self, loop: Any, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        code = getattr(coroutine, "cr_code", None)
        path = code.co_filename if code is not None else ""
        if code is None or "/orchestrator/" not in path or "/orchestrator/testing/" in path:
            return self._make(loop, coroutine, **kwargs)
        walk = Walk(len(self.product), code.co_qualname)
        self.product.append(walk)
        task: asyncio.Task[Any]

        def suspended() -> None:
            walk.suspensions += 1
            if self._at == (walk.ordinal, walk.suspensions):
                self.hit = walk
                self._loop.call_soon(task.cancel)

        task = self._make(loop, Stepped(coroutine, suspended), **kwargs)
        return task


class AtStep:
    """Do something when the loop has run so many callbacks, between two of them."""

    def __init__(self, loop: VirtualLoop, step: int, action: Callable[[], object]) -> None:
        untouched: Any = loop._run_once

        def run_once() -> None:
            nonlocal step
            if 0 <= step <= loop.steps:
                step = -1
                action()
            untouched()

        vars(loop)["_run_once"] = run_once
