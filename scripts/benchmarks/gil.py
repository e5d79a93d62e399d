"""A Python-bound forward thread beside the transfers: how much they slow it, and how late they become.

Forwards of about 20 µs of Python a launch follow each other without a pause; each makes one request final, and its
transfer alone takes 30 % of it. In the control another process sends (or receives) the same bytes at the same moments:
what it costs is the machine's, two cores being full by then, and not the GIL's. Each side has its turn in every round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scripts.benchmarks.baselines import limit
from scripts.benchmarks.baselines.sending import Context, Sender
from scripts.benchmarks.figures import Figure, bounded, compared
from scripts.benchmarks.forward import Compute, run_forward
from scripts.benchmarks.pools import MHA_64, Request, Shape, pages_needed, requests
from scripts.benchmarks.prefill_side import Forwarded
from scripts.benchmarks.remote import Remote
from scripts.benchmarks.rig import Rig, next_generation

SHARE = 0.3
FORWARDS = 5
GROUP = 8
POINTS = 4.0
"""Most percentage points of slowdown beyond the control."""


@dataclass(frozen=True, slots=True)
class Size:
    """Pages of each request; how often all sides take their turn."""

    pages: int
    rounds: int
    shape: Shape = MHA_64


@dataclass(slots=True)
class Times:
    """One entry a round: how much longer the forwards took than alone (%), and the slowest exposed time (ms)."""

    slowdown: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)


def run(quick: bool) -> list[Figure]:
    return measure(Size(16, 3) if quick else Size(64, 11))


def measure(size: Size) -> list[Figure]:
    pages = pages_needed(FORWARDS, size.pages, scattered=True)
    with Rig(size.shape, pages, decodes=2) as rig:
        asked = requests(FORWARDS, 1, size.pages, scattered=True, rng=rig.rng)
        bench = Bench(rig, asked)
        with Remote("scripts.benchmarks.prefill_side:RemotePrefill", size.shape, pages, rig.source.path) as elsewhere:
            return bench.sending(size.rounds, elsewhere) + bench.receiving(size.rounds)


Hooks = tuple[Callable[[int], object] | None, Callable[[], object]]
"""A forward's ``layer_end`` and ``end``."""
Begin = Callable[[int], Hooks]


class Bench:
    """What both directions share."""

    def __init__(self, rig: Rig, asked: list[Request]) -> None:
        self._rig = rig
        self._asked = asked
        self._layers = rig.shape.layers
        alone = statistics.median(self._transfer_alone() for _ in range(4))
        layer_s = alone / SHARE / self._layers
        self._sleeping = Compute(sleep_s=layer_s)
        per_launch = min(run_forward(self._layers, Compute(launches=1)) for _ in range(5)) / self._layers
        self._launching = Compute(launches=max(1, round(layer_s / per_launch)))

    def _transfer_alone(self) -> float:
        blocks = self._rig.blocks(self._asked[0], self._rig.all_layers)
        start = time.perf_counter()
        self._rig.raw.send([(self._rig.where[0].session, blocks)])
        return time.perf_counter() - start

    def _limit_ms(self) -> float:
        blocks = self._rig.blocks(self._asked[0], [self._layers - 1])
        tail = limit.send_alone(self._rig.raw, self._rig.where[0].session, blocks)
        return (tail + limit.round_trip(self._rig.notifiers[0])) * 1e3

    # -- the forward thread sends --------------------------------------------------------------------------------

    def sending(self, rounds: int, elsewhere: Remote) -> list[Figure]:
        times = {name: Times() for name in ("kvferry", "control", "threadpool")}
        limits: list[float] = []
        passes = [self._rig.passes([request], GROUP)[0] for request in self._asked]
        pool = self._rig.threadpool(GROUP)
        for number in range(rounds + 1):
            alone = self._forwards(_no_hooks)[1]
            for name, once in (
                ("kvferry", self._kvferry_sends),
                ("control", lambda: self._control_sends(elsewhere)),
                ("threadpool", lambda: self._pool_sends(pool, passes)),
            ):
                self._rig.refresh()
                seconds, exposed = once()
                self._rig.verify(self._asked)
                if number:
                    times[name].slowdown.append((seconds / alone - 1) * 100)
                    times[name].exposed.append(exposed * 1e3)
            if number:
                limits.append(self._limit_ms())
        pool.close()
        return _figures("sending", times, limits)

    def _forwards(self, begin: Begin) -> tuple[list[float], float]:
        """All forwards in a row and one more that nobody measures, so that the last is not alone at its end.

        Returns when each ended, and the seconds of all."""
        ends: list[float] = []
        start = time.monotonic()
        for number in range(FORWARDS):
            hook, end = begin(number)
            run_forward(self._layers, self._launching, hook)
            end()
            ends.append(time.monotonic())
        seconds = ends[-1] - start
        run_forward(self._layers, self._launching)
        return ends, seconds

    def _kvferry_sends(self) -> tuple[float, float]:
        gen = self._expect(self._rig.side.address)
        prefill, size = self._rig.side.prefill, self._rig.shape.page_size

        def begin(number: int) -> Hooks:
            forward = prefill.begin_forward([self._asked[number].spec(0, gen, size)])
            return forward.layer_end, forward.end

        ends, seconds = self._forwards(begin)
        known = self._rig.committed(self._asked, gen)
        for request in self._asked:
            self._rig.side.result(request, gen)
        return seconds, _exposed(ends, known)

    def _control_sends(self, elsewhere: Remote) -> tuple[float, float]:
        gen = self._expect(elsewhere.call("address"))
        elsewhere.send("forward_each", self._asked, self._sleeping, gen)
        _, seconds = self._forwards(_no_hooks)
        forwards: list[Forwarded] = elsewhere.receive()
        known = self._rig.committed(self._asked, gen)
        elsewhere.call("wait", self._asked, gen)
        return seconds, _exposed([forward.end for forward in forwards], known)

    def _pool_sends(self, pool: Sender, passes: list[list[Context]]) -> tuple[float, float]:
        renamed = self._rig.renamed(passes)

        def begin(number: int) -> Hooks:
            pool.begin(renamed[number])
            return pool.layer_end, pool.end

        ends, seconds = self._forwards(begin)
        return seconds, _exposed(ends, self._noticed(pool, renamed))

    def _noticed(self, pool: Sender, passes: list[list[Context]]) -> list[float]:
        names = [contexts[0].notice for contexts in passes]
        known: list[float] = self._rig.decodes[0].call("noticed", names, 60.0, timeout=70.0)
        if pool.failures:
            raise RuntimeError("a baseline failed") from pool.failures[0]
        return known

    def _expect(self, address: str, decode: int = 0) -> int:
        gen = next_generation()
        self._rig.decodes[decode].call("expect", [address], self._rig.awaited(self._asked, gen))
        return gen

    # -- the forward thread's process receives -------------------------------------------------------------------

    def receiving(self, rounds: int) -> list[Figure]:
        times = {name: Times() for name in ("kvferry", "control", "threadpool")}
        limits: list[float] = []
        passes = [self._rig.passes([request], GROUP)[0] for request in self._asked]
        pool = self._rig.threadpool(GROUP)
        for number in range(rounds + 1):
            alone = self._rig.decodes[0].call("forward", self._layers, self._launching, FORWARDS)
            for name in times:
                self._rig.refresh()
                receiver = 1 if name == "control" else 0
                if name == "threadpool":
                    seconds, exposed = self._pool_is_received(pool, passes)
                else:
                    seconds, exposed = self._kvferry_is_received(receiver)
                self._rig.verify(self._asked, decode=receiver)
                if number:
                    times[name].slowdown.append((seconds / alone - 1) * 100)
                    times[name].exposed.append(exposed * 1e3)
            if number:
                limits.append(self._limit_ms())
        pool.close()
        return _figures("receiving", times, limits)

    def _kvferry_is_received(self, receiver: int) -> tuple[float, float]:
        gen = self._expect(self._rig.side.address, receiver)
        self._rig.decodes[0].send("forward", self._layers, self._launching, FORWARDS + 1)
        ends = [self._rig.side.forward([request], self._sleeping, gen).end for request in self._asked]
        seconds = self._rig.decodes[0].receive() * FORWARDS / (FORWARDS + 1)
        known = self._rig.committed(self._asked, gen, decode=receiver)
        for request in self._asked:
            self._rig.side.result(request, gen)
        return seconds, _exposed(ends, known)

    def _pool_is_received(self, pool: Sender, passes: list[list[Context]]) -> tuple[float, float]:
        renamed = self._rig.renamed(passes)
        self._rig.decodes[0].send("forward", self._layers, self._launching, FORWARDS + 1)
        ends = []
        for contexts in renamed:
            pool.begin(contexts)
            run_forward(self._layers, self._sleeping, pool.layer_end)
            pool.end()
            ends.append(time.monotonic())
        seconds = self._rig.decodes[0].receive() * FORWARDS / (FORWARDS + 1)
        return seconds, _exposed(ends, self._noticed(pool, renamed))


def _no_hooks(number: int) -> Hooks:
    return None, lambda: None


def _exposed(ends: Sequence[float], known: Sequence[float]) -> float:
    """The median exposed time of the requests, each against the end of its own forward."""
    return statistics.median(at - end for end, at in zip(ends, known, strict=True))


def _figures(case: str, times: dict[str, Times], limits: list[float]) -> list[Figure]:
    ours, control, pool = times["kvferry"], times["control"], times["threadpool"]
    beyond = [mine - other for mine, other in zip(ours.slowdown, control.slowdown, strict=True)]
    theirs = [mine - other for mine, other in zip(pool.slowdown, control.slowdown, strict=True)]
    spread = f"{min(beyond):.1f} … {max(beyond):.1f}"
    return [
        bounded(
            "gil",
            f"embedded, {case} (spread {spread})",
            "slowdown beyond the control",
            "points",
            beyond,
            at_most=POINTS,
        ),
        bounded("gil", f"thread pool, {case}", "slowdown beyond the control", "points", theirs),
        bounded("gil", f"control, {case}", "slowdown by another process", "%", control.slowdown),
        compared("gil", f"embedded, {case}", "exposed", "ms", ours.exposed, "limit", limits, at_most=3.0),
        compared("gil", f"embedded, {case}", "exposed", "ms", ours.exposed, "threadpool", pool.exposed),
        compared("gil", f"another process, {case}", "exposed", "ms", control.exposed, "limit", limits),
    ]
