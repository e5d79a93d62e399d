"""The decode worker of a benchmark: kvferry's decode over a shared pool, and what the baselines need of it.

A baseline tells the decode over ZMQ that a request is complete, as every connector does; the time of that notice is
what kvferry's ``committed`` is compared with. The same socket echoes, which measures one control round trip.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import zmq

from orchestrator import Config, Decode, EmbeddedLoop, RoomHandle
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from protocols.blocks import Ints
from protocols.ids import Session
from protocols.layout import Layout
from scripts.benchmarks.forward import Compute, run_forward
from scripts.benchmarks.pools import Shape, SharedPool
from scripts.benchmarks.usage import our_cpu_s

ECHO = b"echo"


@dataclass(frozen=True, slots=True)
class Where:
    """How a sender reaches this worker."""

    session: Session
    layout: Layout
    notices: str


@dataclass(frozen=True, slots=True)
class Awaited:
    """A room the decode is to expect."""

    room: int
    gen: int
    pages: Ints
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended there. Monotonic seconds."""

    ok: bool
    error: str
    stamps: dict[str, float]


class DecodeSide:
    """Served by `Remote`: its methods run one at a time on the process's main thread."""

    def __init__(
        self, shape: Shape, pages: int, path: str, completion: CompletionMode = "auto", config: Config | None = None
    ) -> None:
        self._pool = SharedPool(shape, pages, path)
        self._completion: CompletionMode = completion
        self._config = config or Config()
        self._handles: dict[tuple[int, int], RoomHandle] = {}
        self._notices: dict[bytes, float] = {}
        self._changed = threading.Condition()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._address = f"tcp://127.0.0.1:{port}"
        threading.Thread(target=self._listen, name="notices", daemon=True).start()
        self._start()

    def _start(self) -> None:
        engine = MooncakeEngine(completion=self._completion)
        self._loop = EmbeddedLoop(self._config)
        self._loop.__enter__()
        self._decode: Decode = self._loop.start_decode(engine, self._pool.layout)
        self._session = engine.session

    def renew(self) -> Where:
        """The same pool behind a new engine, loop and incarnation: a peer that nobody knows yet."""
        self._loop.close()
        self._start()
        return self.where()

    def where(self) -> Where:
        return Where(self._session, self._pool.layout, self._address)

    # -- kvferry -------------------------------------------------------------------------------------------------

    def expect(self, addresses: list[str], rooms: list[Awaited]) -> list[float]:
        """Expect rooms; the monotonic second before each call."""
        asked = []
        for awaited in rooms:
            asked.append(time.monotonic())
            self._handles[awaited.room, awaited.gen] = self._decode.expect(
                awaited.room, awaited.gen, addresses, awaited.pages, total_tokens=awaited.tokens
            )
        return asked

    def wait(self, keys: list[tuple[int, int]], timeout: float) -> list[Ended]:
        deadline = time.monotonic() + timeout
        ended = []
        for key in keys:
            result = self._handles.pop(key).wait(max(0.0, deadline - time.monotonic()))
            ended.append(Ended(result.ok, str(result.error or ""), result.stamps))
        return ended

    def still_open(self) -> int:
        """Rooms and leased units in this worker's tables."""

        def count() -> int:
            receiver = self._decode._receiver
            return len(receiver.rooms) + receiver.book.taken()

        return self._loop.call(lambda _: count())

    def abort_each(
        self, addresses: list[str], rooms: list[Awaited], interval: float, delay: float
    ) -> list[tuple[float, float]]:
        """Expect a room every ``interval`` seconds and abort each ``delay`` seconds after it was expected. Returns when
        all units are free: for each room the seconds of its abort and of that moment."""
        aborted: dict[int, float] = {}
        quiet: dict[int, float] = {}
        all_quiet = threading.Event()
        lock = threading.Lock()

        def free(number: int) -> None:
            with lock:
                quiet[number] = time.monotonic()
                if len(quiet) == len(rooms):
                    all_quiet.set()

        handles: list[RoomHandle] = []
        start = time.monotonic()
        for step in range(len(rooms) + round(delay / interval)):
            time.sleep(max(0.0, start + step * interval - time.monotonic()))
            if step < len(rooms):
                awaited = rooms[step]
                handle = self._decode.expect(
                    awaited.room, awaited.gen, addresses, awaited.pages, total_tokens=awaited.tokens
                )
                handle.on_units_free(lambda number=step: free(number))  # type: ignore[misc]
                handles.append(handle)
            late = step - round(delay / interval)
            if late >= 0:
                aborted[late] = time.monotonic()
                handles[late].abort("the benchmark's client went away")
        if not all_quiet.wait(60.0):
            raise TimeoutError(f"only {len(quiet)} of {len(rooms)} rooms became quiet")
        return [(aborted[number], quiet[number]) for number in range(len(rooms))]

    # -- baselines -----------------------------------------------------------------------------------------------

    def noticed(self, names: list[bytes], timeout: float) -> list[float]:
        """When each of these was announced. Monotonic seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(name in self._notices for name in names), timeout):
                raise TimeoutError("a baseline's notice did not come")
            return [self._notices.pop(name) for name in names]

    def _listen(self) -> None:
        while True:
            sender, text = self._socket.recv_multipart()
            now = time.monotonic()
            if text == ECHO:
                self._socket.send_multipart([sender, text])
                continue
            with self._changed:
                self._notices[text] = now
                self._changed.notify_all()

    # -- what a measurement asks ---------------------------------------------------------------------------------

    def forward(self, layers: int, compute: Compute, passes: int) -> float:
        """Seconds that ``passes`` forwards of this worker take; they touch no transfer."""
        return sum(run_forward(layers, compute) for _ in range(passes))

    def cpu(self) -> float:
        """CPU seconds of everything here but the engine's own threads and the main thread, which obeys the bench."""
        main = threading.main_thread().native_id
        return our_cpu_s(set() if main is None else {main})

    def close(self) -> None:
        self._loop.close()
