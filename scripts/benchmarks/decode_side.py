"""The decode worker of a benchmark: kvferry's decode over a shared pool, and what the baselines need of it.

A baseline tells the decode over ZMQ that a request is complete, as every connector does; the time of that notice is
what kvferry's ``committed`` is compared with. The same socket echoes, which measures one control round trip.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import zmq

from orchestrator import Config, Decode, EmbeddedLoop, Node, RoomHandle
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


@dataclass(frozen=True, slots=True)
class Aborted:
    """When a room was aborted and when its units were free. Monotonic seconds."""

    aborted: float
    quiet: float


class _Storm:
    """Rooms that are all aborted; the moments of it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._handles: list[RoomHandle] = []
        self._aborted: list[float] = []
        self._quiet: dict[int, float] = {}
        self._all_quiet = threading.Event()

    def add(self, handle: RoomHandle) -> None:
        number = len(self._handles)
        self._handles.append(handle)
        handle.on_units_free(lambda: self._free(number))

    def _free(self, number: int) -> None:
        """Loop thread."""
        self._quiet[number] = time.monotonic()
        if len(self._quiet) == self._count:
            self._all_quiet.set()

    def abort(self, number: int) -> None:
        self._aborted.append(time.monotonic())
        self._handles[number].abort("the benchmark's client went away")

    def wait(self, timeout: float) -> list[Aborted]:
        if not self._all_quiet.wait(timeout):
            raise TimeoutError(f"only {len(self._quiet)} of {self._count} rooms became quiet")
        return [Aborted(at, self._quiet[number]) for number, at in enumerate(self._aborted)]


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

        def count(node: Node) -> int:
            assert node.receiver is not None
            return len(node.receiver.rooms) + node.receiver.book.taken()

        return self._loop.call(count)

    def abort(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            self._handles.pop(key).abort("the benchmark has seen enough")

    def abort_each(
        self, addresses: list[str], rooms: list[Awaited], start: float, interval: float, delay: float
    ) -> list[Aborted]:
        """From ``start`` on expect a room every ``interval`` seconds and abort each ``delay`` seconds later. Returns
        when all of their units are free."""
        storm = _Storm(len(rooms))
        lag = max(1, round(delay / interval))
        for step in range(len(rooms) + lag):
            time.sleep(max(0.0, start + step * interval - time.monotonic()))
            if step < len(rooms):
                one = rooms[step]
                storm.add(self._decode.expect(one.room, one.gen, addresses, one.pages, total_tokens=one.tokens))
            if step >= lag:
                storm.abort(step - lag)
        return storm.wait(60.0)

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
