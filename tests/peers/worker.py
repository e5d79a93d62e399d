"""A prefill or decode worker in a process of its own, over real sockets and the real engine, told what to do by a test.

``python -m tests.peers.worker`` is the child: one JSON object a line on standard input, one answer a line on standard
output, after a ``=``, since the native library writes there as well. :class:`Worker` is the test's side of it. Every
question has a time limit, and a worker ends with the test that started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.decode import Decode, RoomHandle
from orchestrator.engines.base import Engine
from orchestrator.engines.faulty import Fault, FaultyEngine, nth
from orchestrator.engines.mooncake import MooncakeEngine
from orchestrator.engines.paced import PacedEngine
from orchestrator.loop_thread import EmbeddedLoop
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from orchestrator.testing.pool import Pool
from orchestrator.trace import TransferResult
from protocols.errors import KvferryError
from protocols.ids import RoomKey, Session

START_S = 30.0
"""Seconds for a worker to start: it loads the native library, and the first one of all tries its symbols out."""
ANSWER_S = 20.0
"""Seconds for any other answer, beyond the time the question itself allows."""
PROGRESS_S = 1
"""After so many seconds without progress the engine gives a write up."""
ENVIRONMENT = {"MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_S), "MC_TCP_STATUS_TIMEOUT_SEC": str(PROGRESS_S)}
"""A stopped peer is given up after a second instead of five: tests wait for it."""


class Worker:
    """A worker process. Leaving the context kills it, by its own pid, whatever state it is in."""

    def __init__(self) -> None:
        self._answers: queue.Queue[str] = queue.Queue()
        self._child: subprocess.Popen[str] | None = None
        self._opened: dict[str, str] | None = None

    def __enter__(self) -> Worker:
        command, pipe = [sys.executable, "-m", "tests.peers.worker"], subprocess.PIPE
        environment = os.environ | ENVIRONMENT
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.kill()

    def start(self, role: str, pool: dict[str, Any], **options: Any) -> Worker:
        """Open one side; ``options`` are those of `Side.open`. Does not wait: several workers start side by side."""
        self._tell("open", role=role, pool=pool, **options)
        return self

    @property
    def opened(self) -> dict[str, str]:
        """What `Side.open` answered, once it has."""
        if self._opened is None:
            self._opened = self._answer(START_S)
        return self._opened

    @property
    def address(self) -> str:
        return self.opened["address"]

    def ask(self, what: str, **fields: Any) -> Any:
        """Tell it, and wait for the answer: ``timeout`` is the worker's own limit, where the question has one.

        Raises TimeoutError, and RuntimeError with what the worker raised."""
        assert self.opened
        self._tell(what, **fields)
        return self._answer(fields.get("timeout", 0.0) + ANSWER_S)

    def _tell(self, what: str, **fields: Any) -> None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        child.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        child.stdin.flush()

    def _answer(self, limit: float) -> Any:
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"the worker did not answer within {limit} s") from None
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        child = self._child
        if child is None:
            return
        child.kill()
        child.wait(10)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _read(self) -> None:
        child = self._child
        assert child is not None
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("="):
                    self._answers.put(line[1:])
        except ValueError:
            return  # closed by the kill
        self._answers.put(json.dumps({"error": "the worker process has ended"}))


# -- the child -----------------------------------------------------------------------------------------------------


class Elsewhere(MooncakeEngine):
    """An engine whose Hello names a session that is not its own."""

    def __init__(self, session: str) -> None:
        super().__init__()
        self.session = Session(session)


class Side:
    """What a worker does for a test. Every method is a question; its fields come from the test."""

    def __init__(self) -> None:
        self.handles: dict[RoomKey, RoomHandle] = {}
        self.faults: list[Fault] = []

    def open(
        self,
        role: str,
        pool: dict[str, Any],
        config: dict[str, Any] | None = None,
        bind: str = "tcp://127.0.0.1:0",
        completion: Any = "auto",
        gigabits: float = 0.0,
        faulty: bool = False,
        session: str = "",
    ) -> dict[str, str]:
        """``gigabits`` paces what it sends, ``faulty`` lets it hold batches, ``session`` is a lie in its Hello."""
        self.pool = Pool(**pool)
        engine: Engine = Elsewhere(session) if session else MooncakeEngine(completion=completion)
        mode = engine.info.completion_mode
        if gigabits:
            engine = PacedEngine(engine, gigabits, time.monotonic)
        if faulty:
            engine = FaultyEngine(engine)
        self.engine = engine
        self.loop = EmbeddedLoop(Config(**(config or {})))
        self.loop.__enter__()
        self.prefill: Prefill
        self.decode: Decode
        address = ""
        if role == "prefill":
            self.prefill = self.loop.start_prefill(engine, self.pool.layout, bind)
            address = self.prefill.address
        else:
            self.decode = self.loop.start_decode(engine, self.pool.layout)
        return {"address": address, "session": engine.session, "mode": mode}

    def fill(self, seed: int) -> None:
        """Other content in every page."""
        rng = np.random.default_rng(seed)
        for array in self.pool.arrays.values():
            array[...] = rng.integers(0, 256, array.shape, np.uint8)

    def digest(self, pages: list[int], layers: list[int] | None = None) -> str:
        """A hash of these pages, in this order, over every layer (or these)."""
        digest = hashlib.sha256()
        for (name, layer), array in sorted(self.pool.arrays.items()):
            if name not in ("aux", "scratch") and (layers is None or layer in layers):
                digest.update(array[pages].tobytes())
        return digest.hexdigest()

    # -- prefill ---------------------------------------------------------------------------------------------------

    def forward(self, room: int, gen: int, pages: list[int], layers: list[int], **more: Any) -> list[str]:
        """One whole forward over one chunk, which is the last unless told otherwise."""
        spec = ChunkSpec(room=room, gen=gen, pages=pages, **{"last": True} | more)
        with self.prefill.begin_forward([spec]) as forward:
            for layer in layers:
                forward.layer_end(layer)
        return forward.refused

    def poll(self, room: int, gen: int) -> str:
        return self.prefill.poll(room, gen).name

    def finished(self, room: int, gen: int, timeout: float) -> dict[str, Any]:
        return outcome(self.prefill.wait(room, gen, timeout))

    def source_free(self, room: int, gen: int, timeout: float = 0.0) -> bool:
        return within(timeout, lambda: self.prefill.source_free(room, gen))

    def hold(self, *, ordinal: int) -> None:
        """Hold the batch with this ordinal, counted from 0, before it reaches the real engine."""
        assert isinstance(self.engine, FaultyEngine)
        self.faults.append(self.engine.add(Fault(nth(ordinal), hold=True)))

    def release(self) -> None:
        def on_loop(node: Node) -> None:
            for fault in self.faults:
                fault.release()
            node.pacer.kick()

        self.loop.call(on_loop)

    def attempts(self, at_least: int, timeout: float) -> bool:
        """Whether that many batches were submitted in time."""
        engine = self.engine
        assert isinstance(engine, FaultyEngine)
        return within(timeout, lambda: engine.attempts >= at_least)

    def idle(self, timeout: float) -> bool:
        """Whether the engine has nothing under way, in time."""
        return within(timeout, lambda: self.loop.call(lambda node: self.engine.pending) == 0)

    # -- decode ----------------------------------------------------------------------------------------------------

    def expect(self, room: int, gen: int, peers: list[str], pages: list[int], **more: Any) -> None:
        total = len(pages) * self.pool.page_size
        handle = self.decode.expect(room, gen, peers, pages, **{"total_tokens": total} | more)
        self.handles[RoomKey(room, gen)] = handle

    def wait(self, room: int, gen: int, timeout: float) -> dict[str, Any]:
        return outcome(self.handles[RoomKey(room, gen)].wait(timeout))

    def abort(self, room: int, gen: int) -> bool:
        return self.handles[RoomKey(room, gen)].abort()

    def free(self, room: int, gen: int, timeout: float = 0.0) -> bool:
        return within(timeout, self.handles[RoomKey(room, gen)].units_free)

    def touched(self, page: int, timeout: float) -> bool:
        """Whether a byte of this page has arrived, in time."""
        arrays = [array for (name, _), array in self.pool.arrays.items() if name not in ("aux", "scratch")]
        return within(timeout, lambda: any((array[page] != 0xEE).any() for array in arrays))

    def quarantine(self, unknown: int = 0, in_doubt: int = 0, timeout: float = 0.0) -> list[int]:
        """How many units are unknown and in doubt, as soon as there are that many, or when the time is over."""

        def count() -> list[int]:
            entries = self.decode.quarantine()
            return [sum(entry.unknown for entry in entries), sum(entry.in_doubt for entry in entries)]

        within(timeout, lambda: count()[0] >= unknown and count()[1] >= in_doubt)
        return count()

    def check(self, address: str) -> dict[str, Any]:
        started = time.monotonic()
        try:
            self.decode.check(address)
        except KvferryError as error:
            return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
        return {"kind": "", "text": "", "seconds": time.monotonic() - started}


def within(timeout: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def outcome(result: TransferResult) -> dict[str, Any]:
    return {"ok": result.ok, "error": str(result.error or ""), "bytes": result.bytes, "blocks": result.blocks}


def main() -> None:
    side = Side()
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = {"value": getattr(side, fields.pop("do"))(**fields)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"={json.dumps(answer)}\n")
        sys.stdout.flush()
    os._exit(0)  # the test is gone


if __name__ == "__main__":
    main()
