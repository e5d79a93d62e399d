"""The prefill worker of a benchmark: kvferry's prefill over a pool, in this process or served by `Remote`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orchestrator import Config, EmbeddedLoop, ForwardPass, Node, TransferResult
from orchestrator.engines.base import Engine
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from scripts.benchmarks.forward import Compute, run_forward
from scripts.benchmarks.pools import Request, Shape, SharedPool
from scripts.benchmarks.quiet import quiet


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The forwards that made requests final. Monotonic seconds."""

    start: float
    end: float
    hooks_cpu_s: float
    """CPU seconds of the forward thread within kvferry's calls."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class PrefillSide:
    """Context manager. With ``path`` the pool is another process's."""

    def __init__(
        self,
        pool: SharedPool,
        *,
        completion: CompletionMode = "auto",
        config: Config | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.pool = pool
        with quiet():
            self.engine = engine or MooncakeEngine(completion=completion)
        self._loop = EmbeddedLoop(config or Config())
        self._loop.__enter__()
        self.prefill = self._loop.start_prefill(self.engine, pool.layout)

    @property
    def address(self) -> str:
        return self.prefill.address

    def forward(
        self, requests: Sequence[Request], compute: Compute, gen: int, *, count_hooks: bool = False
    ) -> Forwarded:
        """One forward a chunk; each makes that chunk of every request final. Every layer is computed and reported."""
        hooks = 0
        clock = time.thread_time_ns
        start = time.monotonic()
        for number in range(len(requests[0].cuts)):
            before = clock()
            forward = self.prefill.begin_forward(
                [request.spec(number, gen, self.pool.shape.page_size) for request in requests]
            )
            hooks += clock() - before
            if count_hooks:
                hooks += _run_counted(self.pool.shape.layers, compute, forward)
            else:
                run_forward(self.pool.shape.layers, compute, forward.layer_end)
            before = clock()
            forward.end()
            hooks += clock() - before
        return Forwarded(start, time.monotonic(), hooks / 1e9)

    def result(self, request: Request, gen: int, timeout: float = 60.0) -> TransferResult:
        """Wait until the request has ended here, too."""
        return self.prefill.wait(request.number, gen, timeout)

    def still_open(self) -> int:
        """Rooms, busy lanes and engine batches in this worker's tables."""

        def count(node: Node) -> int:
            assert node.sender is not None
            busy = sum(not lane.idle for lane in node.sender.sessions.lanes.values())
            return len(node.sender.rooms) + busy + node.sender.engine.pending

        return self._loop.call(count)

    def close(self) -> None:
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemotePrefill:
    """The same for `Remote`: it sends the other process's pool."""

    def __init__(self, shape: Shape, pages: int, path: str) -> None:
        self._side = PrefillSide(SharedPool(shape, pages, path))

    def address(self) -> str:
        return self._side.address

    def forward_each(self, requests: list[Request], compute: Compute, gen: int) -> list[Forwarded]:
        """One forward a request, in a row."""
        return [self._side.forward([request], compute, gen) for request in requests]

    def wait(self, requests: list[Request], gen: int) -> None:
        for request in requests:
            self._side.result(request, gen)

    def close(self) -> None:
        self._side.close()


def _run_counted(layers: int, compute: Compute, forward: ForwardPass) -> int:
    """A forward; returns the CPU nanoseconds of its hooks alone."""
    spent = 0
    clock = time.thread_time_ns
    empty = min(_empty() for _ in range(20))

    def layer_end(layer: int) -> None:
        nonlocal spent
        before = clock()
        forward.layer_end(layer)
        spent += clock() - before - empty

    run_forward(layers, compute, layer_end)
    return max(0, spent)


def _empty() -> int:
    before = time.thread_time_ns()
    return time.thread_time_ns() - before
