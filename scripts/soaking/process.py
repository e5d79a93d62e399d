"""A worker process: made, asked, stopped, resumed and killed by its own pid. It ends with the process that made it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Role = Literal["prefill", "decode"]
ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
LINE_LIMIT = 1 << 24


class WorkerGone(Exception):
    """The process has ended: what was asked of it will not be answered."""


class Worker:
    """``async with Worker("decode", pool={…}, config={…}) as worker: await worker.call("tables")``.

    ``pool`` and ``config`` are the keyword arguments of its `Pool` and its `Config`; ``options`` those of its role;
    ``environ`` is added to its environment.
    """

    def __init__(
        self,
        role: Role,
        *,
        pool: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.role = role
        self.pid = 0
        self.started: dict[str, Any] = {}
        """What it said of itself: its address, its session."""
        self._said = {"pool": pool or {}, "config": config or {}, **options}
        self._environ = environ or {}
        self._child: subprocess.Popen[bytes]
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._gone = True

    async def start(self) -> Worker:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "scripts.soaking.worker", self.role, str(theirs.fileno())]
        self._child = subprocess.Popen(  # noqa: ASYNC220
            [*command, json.dumps(self._said)],
            cwd=ROOT,
            env=os.environ | self._environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        theirs.close()
        self.pid = self._child.pid
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        self._gone = False
        self._reading = asyncio.create_task(self._read(reader))
        try:
            self.started = await self.call("start", patience=START_S)
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aenter__(self) -> Worker:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def ask(self, method: str, **arguments: Any) -> asyncio.Future[Any]:
        """Ask now, answered later. The future raises WorkerGone, or RuntimeError with the traceback of over there."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._gone:
            answer.set_exception(WorkerGone(self._last_words()))
            answer.exception()  # whoever never asks is not told twice
            return answer
        self._number += 1
        self._answers[self._number] = answer
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        line = json.dumps({"id": self._number, "method": method, "arguments": arguments})
        self._writer.write(line.encode() + b"\n")
        return answer

    async def call(self, method: str, *, patience: float = 60.0, **arguments: Any) -> Any:
        """Ask and wait. Raises TimeoutError too."""
        async with asyncio.timeout(patience):
            return await self.ask(method, **arguments)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                said = json.loads(line)
                answer = self._answers.pop(said["id"])
                if answer.done():
                    continue
                if "error" in said:
                    answer.set_exception(RuntimeError(f"in the {self.role} worker:\n{said['error']}"))
                else:
                    answer.set_result(said["value"])
        except ConnectionError:
            pass
        self._gone = True
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(WorkerGone(self._last_words()))

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 2000))
        text = self._errors.read().decode(errors="replace").strip()
        return f"the {self.role} worker {self.pid} has ended" + (f"; it said:\n{text}" if text else "")

    # -- what happens to it --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """SIGSTOP; returns when all of its threads stand still, which is later than the signal."""
        os.kill(self.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is reaped. Idempotent."""
        if self._child.poll() is None:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
        await self._reading
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass
        self._errors.close()

    async def close(self) -> None:
        """Let it end by itself: rooms aborted, peers told, its engine deleted."""
        try:
            await self.call("close", patience=30.0)
        except WorkerGone:
            pass
        await self.kill()

    @property
    def rss(self) -> int:
        """Its resident memory now (bytes)."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
