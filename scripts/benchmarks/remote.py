"""An object in another process, called one method at a time over a pipe. It ends with this process."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

START_SECONDS = 60.0
END_SECONDS = 5.0


class Remote:
    """``with Remote("package.module:Class", *arguments) as remote: remote.call("method", …)``.

    What the method returns or raises comes back. `send` and `receive` are the two halves of a call.
    """

    def __init__(self, target: str, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")  # never fork a process that has an engine
        ours, theirs = context.Pipe()
        self._pipe: Connection = ours
        self._process = context.Process(target=_serve, args=(theirs, target, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.receive(START_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *arguments: object, timeout: float = 60.0) -> Any:
        self.send(method, *arguments)
        return self.receive(timeout)

    def send(self, method: str, *arguments: object) -> None:
        self._pipe.send((method, arguments))

    def receive(self, timeout: float = 60.0) -> Any:
        """The answer to the oldest `send` that was not answered yet. Raises RuntimeError with its traceback."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the process did not answer within {timeout:g} s")
        try:
            worked, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process ended unexpectedly") from None
        if not worked:
            raise RuntimeError(f"in the other process:\n{value}")
        return value

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(pipe: Connection, target: str, arguments: tuple[object, ...]) -> None:
    """The other process: make the object, then carry out calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the measuring process, which ends this one
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the native library's lines; errors of ours travel in the pipe
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    module, _, name = target.partition(":")
    try:
        served: Any = getattr(importlib.import_module(module), name)(*arguments)
    except Exception:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)
    pipe.send((True, None))
    with contextlib.suppress(EOFError, OSError):
        while (command := pipe.recv()) is not None:
            pipe.send(_carried_out(served, *command))
        served.close()
    os._exit(0)  # the engine's threads need no farewell


def _carried_out(served: Any, method: str, arguments: tuple[object, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(served, method)(*arguments)
    except Exception:
        return False, traceback.format_exc()
