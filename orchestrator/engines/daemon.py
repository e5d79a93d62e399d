"""One blocking native call in a daemon thread, its result on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Start ``call`` in a thread called ``name`` and return a future of its result or exception.

    A daemon thread, not the default executor: that one is joined at interpreter exit, and these calls may take a
    minute. Cancelling the future does not stop the call; its result is then dropped, as it is when the loop has closed.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:  # it belongs to whoever awaits, whatever it is
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop closed meanwhile: nobody waits any more
            pass

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
