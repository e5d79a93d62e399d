"""The embedded loop: one named thread behind one door.

The thread runs uvloop (asyncio's own loop where uvloop is missing) and one `Node`. What fails while starting reaches
the caller; calls that would deadlock (from the loop's own thread) are refused; leaving the context joins the thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from orchestrator.config import Config
from orchestrator.cuda_events import EventSource
from orchestrator.decode import Decode
from orchestrator.engines.base import Engine
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from protocols.errors import ClosedError, LocalError
from protocols.layout import Layout

log = logging.getLogger("kvferry.loop")
T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop, or asyncio's own where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class EmbeddedLoop:
    """Context manager. Every method may be called from any thread but the loop's own.

    ``config`` is the default for the sides started here.
    """

    def __init__(self, config: Config | None = None, *, name: str = "kvferry") -> None:
        self._config = config or Config()
        self._name = name
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node: Node | None = None
        self._stopping: asyncio.Event | None = None

    def __enter__(self) -> EmbeddedLoop:
        if self._thread is not None:
            raise LocalError("the loop was entered before", hint="Make a new EmbeddedLoop.")
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=self._name, daemon=True)
        self._thread.start()
        started.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every room, tell the peers, drain, delete the engines, join the thread. Idempotent."""
        thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None or loop is None or stopping is None:
            return
        if threading.current_thread() is thread:
            raise LocalError("the loop thread cannot join itself")
        if thread.is_alive():
            try:
                loop.call_soon_threadsafe(stopping.set)
            except RuntimeError:
                pass  # it ended by itself meanwhile
        thread.join()

    def start_prefill(
        self,
        engine: Engine,
        layout: Layout,
        bind: str = "tcp://127.0.0.1:0",
        config: Config | None = None,
        events: EventSource | None = None,
    ) -> Prefill:
        """See `Node.start_prefill`. The engine belongs to the loop from now on."""
        return self.call(lambda node: node.start_prefill(engine, layout, bind, config or self._config, events))

    def start_decode(
        self,
        engine: Engine,
        layout: Layout,
        config: Config | None = None,
        renew: Callable[[], Engine] | None = None,
    ) -> Decode:
        """See `Node.start_decode`. The engine belongs to the loop from now on."""
        return self.call(lambda node: node.start_decode(engine, layout, config or self._config, renew))

    def call(self, function: Callable[[Node], T]) -> T:
        """Run a function on the loop thread and return what it returns or raises. Blocks this thread.

        Raises ClosedError when the loop has ended, LocalError on the loop's own thread.
        """
        node = self._node
        if node is None or self._thread is None or not self._thread.is_alive():
            raise ClosedError("the loop is not running", hint="Use EmbeddedLoop as a context manager.")
        if threading.current_thread() is self._thread:
            raise LocalError("this would wait for itself: the caller is the loop thread")
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(function(node))
            except BaseException as exc:
                answer.set_exception(exc)

        node.inbox.put(run)
        return answer.result()

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        try:
            loop = new_event_loop()
        except BaseException as exc:
            started.set_exception(exc)
            return
        try:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(self._main(loop, started))
        except BaseException as exc:
            if not started.done():
                started.set_exception(exc)
            else:
                log.exception("the loop thread died")
        finally:
            left = asyncio.all_tasks(loop)  # none, unless it died
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    async def _main(self, loop: asyncio.AbstractEventLoop, started: concurrent.futures.Future[None]) -> None:
        self._loop = loop
        self._stopping = asyncio.Event()
        async with Node() as node:
            self._node = node
            started.set_result(None)
            await self._stopping.wait()
