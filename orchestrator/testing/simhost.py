"""A simulated world and its processes: hosts that crash and come back, each life with memory, engine, device and node.

Everything of a process runs in its domain; its engine's native threads and its device have domains of their own, held
and killed with it (a stopped process's device goes on). Determinism: every life draws from generators made of the
seed, the host's name and the number of the life.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from orchestrator.config import Config
from orchestrator.cuda_events import Event
from orchestrator.decode import Decode
from orchestrator.engines.base import EngineLimits
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from orchestrator.testing.oracle import Oracle
from orchestrator.testing.pool import Pool
from orchestrator.testing.simengine import SimEngine
from orchestrator.testing.simfabric import SimFabric
from orchestrator.testing.simmemory import Memory
from orchestrator.testing.simnet import SimNet
from orchestrator.testing.simplan import (
    DECODE_PAGES,
    DRAFTS,
    LAYERS,
    PAGE_SIZE,
    PREFILL_PAGES,
    GroupPlan,
    Workload,
)
from orchestrator.testing.virtual import START, Domain, SimClock, VirtualLoop
from protocols.errors import BusyError
from protocols.ids import RoomKey

ITEM_BYTES = 8
AUX_SLOTS = 12
STATE_ROWS = 12
FIRST_PORT = 15000
PORTS_PER_HOST = 1000
LIMITS = EngineLimits(max_block_bytes=24, max_batch_blocks=4, window_blocks=10, window_bytes=256)
SCALE: dict[str, Any] = {
    "connect_timeout_s": 2.0,
    "bootstrap_timeout_s": 8.0,
    "progress_timeout_s": 5.0,
    "waiting_timeout_s": 14.0,
    "room_timeout_s": 14.0,
    "commit_timeout_s": 4.0,
    "pass_timeout_s": 6.0,
    "drain_timeout_s": 1.5,
    "ping_interval_s": 0.5,
    "silence_s": 2.5,
    "rollover_timeout_s": 1.5,
    "tombstone_s": 120.0,
}
"""Deadlines of a simulated world (seconds): in the product's proportions, short enough to be met in every run."""


class SimDevice:
    """An event source: one stream whose kernels run in order, each after its time, also while the process stands."""

    def __init__(self, loop: VirtualLoop, domain: Domain) -> None:
        self.domain = domain
        self._loop = loop
        self._queue: deque[Callable[[], None]] = deque()
        self._free_at = 0.0
        self._enqueued = 0
        self._completed = 0

    def launch(self, kernel: Callable[[], None], seconds: float) -> None:
        """Enqueue work; returns at once."""
        self._free_at = max(self._free_at, self._loop.time()) + seconds
        self._enqueued += 1
        self._queue.append(kernel)
        self._loop.call_at(self._free_at, self._run, context=self.domain.context)

    def _run(self) -> None:
        self._queue.popleft()()
        self._completed += 1

    def record(self) -> Event:
        return _SimEvent(self, self._enqueued)

    def enter_loop_thread(self) -> None:
        return None

    def reached(self, position: int) -> bool:
        return self._completed >= position


class _SimEvent:
    stream = "compute"

    def __init__(self, device: SimDevice, position: int) -> None:
        self._device = device
        self._position = position

    def query(self) -> bool:
        return self._device.reached(self._position)


class World:
    """Loop, networks, oracle and history of one run."""

    def __init__(self, loop: VirtualLoop, workload: Workload) -> None:
        self.loop = loop
        self.workload = workload
        self.history: list[tuple[float, str, str, tuple[object, ...]]] = []
        """(virtual seconds since the start, who, what, details): rendered only when somebody reads it."""
        self.net = SimNet(loop, workload.seed * 3 + 1, self.record, workload.net)
        self.fabric = SimFabric(loop, workload.seed * 3 + 2, workload.engine)
        self.oracle = Oracle(self.fabric, self.elapsed, self.record)
        self.counts: dict[str, int] = dict.fromkeys(("ok", "failed", "aborts", "crashes", "rollovers"), 0)
        self.calm = False
        """Nothing goes wrong any more."""
        self.rooms: set[int] = set()
        """Numbers of the plans that a side was told of."""
        self.prefills = [Host(self, f"P{n}", self._group_of(n)) for n in range(workload.prefills)]
        self.decodes = [Host(self, f"D{n}", None) for n in range(workload.decodes)]

    @property
    def hosts(self) -> list[Host]:
        return [*self.prefills, *self.decodes]

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def _group_of(self, number: int) -> GroupPlan:
        return next(group for group in self.workload.groups if number in group.prefills)

    def elapsed(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.time() - START

    def record(self, actor: str, verb: str, *details: object) -> None:
        self.history.append((self.loop.time() - START, actor, verb, details))


class Host:
    """A place with an address where one process runs at a time."""

    def __init__(self, world: World, name: str, group: GroupPlan | None) -> None:
        """``group``: of a prefill; None makes it a decode."""
        self.world = world
        self.name = name
        self.group = group
        self.address = f"tcp://{name}:7000"
        self.life: Life | None = None
        self.gone = False
        """Nobody comes back here."""
        self.lives: list[Life] = []
        self.first_port = FIRST_PORT + PORTS_PER_HOST * (2 * int(name[1:]) + (group is None))
        self.ports: list[int] = []
        """Those that an engine here had, one an engine."""

    @property
    def alive(self) -> bool:
        return self.life is not None and not self.life.domain.dead

    def start(self, begin: Callable[[Life], None]) -> None:
        """A fresh process. ``begin`` runs in it once its side is up."""
        assert not self.alive, f"{self.name} runs already"
        self.life = Life(self, len(self.lives) + 1)
        self.lives.append(self.life)
        self.life.start(begin)


class Life:
    """One process of a host, from its start to its end."""

    def __init__(self, host: Host, number: int) -> None:
        world = host.world
        self.world = world
        self.host = host
        self.name = f"{host.name}#{number}"
        self.rng = random.Random(f"{world.workload.seed} {self.name}")
        self.domain = Domain(self.name)
        self.io = Domain(f"{self.name}/io")
        self.device = SimDevice(world.loop, Domain(f"{self.name}/device"))
        self.memory = Memory(_make_pool(host.group, host.name))
        self.side = world.oracle.side(self.domain, self.name, self.memory)
        self.config = Config(name=host.name if world.workload.named else "", **SCALE, **world.workload.config)
        self.node: Node | None = None
        self.prefill: Prefill | None = None
        self.decode: Decode | None = None
        self.engines: list[SimEngine] = []
        self.worker: Any = None
        """The embedder, see `orchestrator.testing.simworkers`."""
        self.held_s = 0.0
        """How long it has stood still, all together."""
        self.leaving = False
        self.left = False
        self._stopped_at = 0.0
        self._leave = asyncio.Event()

    def start(self, begin: Callable[[Life], None]) -> None:
        self.world.record(self.name, "starts")
        self.world.loop.spawn(self._main(begin), self.domain, f"{self.name} main")

    async def _main(self, begin: Callable[[Life], None]) -> None:
        world, layout = self.world, self.memory.layout
        clock = SimClock(world.loop, offset=self.rng.uniform(0, 1e5))
        network = world.net.process(self.host.name, self.domain)
        node = self.node = Node(clock=clock, rng=random.Random(self.rng.random()), network=network)
        if self.host.group is not None:
            self.prefill = node.start_prefill(self._make_engine(), layout, self.host.address, self.config, self.device)
        else:
            self.decode = node.start_decode(self._make_engine(), layout, self.config, self._make_engine)
        begin(self)
        await self._leave.wait()
        await node.stop()
        self.left = True
        self.kill()

    def _make_engine(self) -> SimEngine:
        fabric = self.world.fabric
        if self.engines and not self.world.calm and self.rng.random() < self.world.workload.no_engine:
            raise BusyError("no engine can be made now")
        port = self._choose_port()
        engine = SimEngine(fabric, self.host.name, domain=self.domain, io=self.io, port=port, limits=LIMITS)
        self.engines.append(engine)
        self.host.ports.append(port)
        self.world.record(self.name, "makes engine", engine.session)
        return engine

    def _choose_port(self) -> int:
        """Names repeat, as they do on real hosts: one of this process's own earlier ports, or of a process before."""
        own = [engine.ports[0] for engine in self.engines]
        earlier, chance = (own, 0.5) if own else (self.host.ports, 0.3)
        free = self.world.fabric.free_ports(self.host.name, dict.fromkeys(earlier))
        if self.world.workload.reuse_ports and free and self.rng.random() < chance:
            return self.rng.choice(free)
        return self.host.first_port + len(self.host.ports)

    def check_deadline(self, key: RoomKey, since: float, held_before: float) -> None:
        """A room that ends does so within its deadlines, from the moment this side knew of it."""
        took = self.world.loop.time() - since - (self.held_s - held_before)
        if took > SCALE["room_timeout_s"] + SCALE["commit_timeout_s"] + 1.0:
            self.world.oracle.violate("hang: a room outlived its deadlines", f"{self.name}: {key} took {took:.3f} s")

    # -- what the world does to it -----------------------------------------------------------------------------------

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run it in the process, soon; never if the process is dead."""
        self.world.loop.call_soon(function, *args, context=self.domain.context)

    def leave(self) -> None:
        """Shut down in order."""
        self.world.record(self.name, "leaves")
        self.leaving = True
        self.call(self._leave.set)

    def kill(self) -> None:
        """End without a word. Nothing can be written to it any more."""
        if self.domain.dead:
            return
        world = self.world
        world.record(self.name, "ends" if self.left else "is killed")
        for domain in (self.domain, self.io, self.device.domain):
            world.loop.kill(domain)
        world.net.kill(self.domain)
        world.fabric.kill(self.domain)

    def stop(self) -> None:
        """SIGSTOP: its threads stand, its device and what is in the network go on."""
        self.world.record(self.name, "stands still")
        self._stopped_at = self.world.loop.time()
        self.world.loop.hold(self.domain)
        self.world.loop.hold(self.io)

    def go_on(self) -> None:
        """SIGCONT."""
        if not self.domain.dead and self.domain.held:
            self.world.record(self.name, "goes on")
            self.held_s += self.world.loop.time() - self._stopped_at
        self.world.loop.resume(self.domain)
        self.world.loop.resume(self.io)


def _make_pool(group: GroupPlan | None, host: str) -> Pool:
    common: dict[str, Any] = {
        "layers": LAYERS,
        "drafts": DRAFTS,
        "page_size": PAGE_SIZE,
        "item_len": ITEM_BYTES,
        "kind": "mla",
        "aux_slots": AUX_SLOTS,
        "aux_len": ITEM_BYTES,
    }
    if group is None:
        return Pool(pages=DECODE_PAGES, state_rows=STATE_ROWS, **common)
    rank = group.prefills.index(int(host[1:]))
    common |= {"pages": PREFILL_PAGES, "with_aux": rank == 0, "state_rows": STATE_ROWS if rank == 0 else 0}
    if group.kind == "cp":
        common |= {"cp_rank": rank, "cp_size": 2, "cp_mode": "zigzag" if group.zigzag else "contiguous"}
    elif group.kind == "pp":
        own = ([0, 1], [2, 3])[rank]
        common |= {"pp_rank": rank, "pp_size": 2, "own_layers": own}
    return Pool(**common)
