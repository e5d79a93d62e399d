"""One prefill process (this one) and one or more decode processes, ready for kvferry and for every baseline.

All sides of a comparison use the same source pool, destination pools, wheel and settings, and take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from orchestrator import Config
from orchestrator.engines.base import Engine
from orchestrator.engines.mooncake import CompletionMode
from protocols.blocks import Blocks, Ints
from scripts.benchmarks.baselines.monolithic import Monolithic
from scripts.benchmarks.baselines.raw import RawEngine, as_ints
from scripts.benchmarks.baselines.sending import Context, Notifier, Sender
from scripts.benchmarks.baselines.threadpool import ThreadPool
from scripts.benchmarks.decode_side import Awaited, Ended, Where
from scripts.benchmarks.forward import Compute, run_forward
from scripts.benchmarks.pools import Request, Shape, SharedPool, blocks_of, requests
from scripts.benchmarks.prefill_side import Forwarded, PrefillSide
from scripts.benchmarks.quiet import quiet
from scripts.benchmarks.remote import Remote

_generations = itertools.count(1)


class WrongBytesError(Exception):
    """A run delivered other bytes than it should have: no figure of it counts."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """One run of one side: when its forwards ran and when the decode knew of each request's end."""

    forward: Forwarded
    known: list[float]

    @property
    def seconds(self) -> float:
        """From the end of the last forward until the last request was complete at the decode."""
        return max(self.known) - self.forward.end

    @property
    def total(self) -> float:
        return max(self.known) - self.forward.start


class Rig:
    """Context manager. ``pages`` is the size of each pool; ``decodes`` processes receive."""

    def __init__(
        self,
        shape: Shape,
        pages: int,
        *,
        decodes: int = 1,
        completion: CompletionMode = "auto",
        engine: Engine | None = None,
        config: Config | None = None,
        seed: int = 1,
        source_pages: int | None = None,
    ) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.source = SharedPool(shape, source_pages or pages)
        self.source.fill(seed)
        self.targets = [SharedPool(shape, pages) for _ in range(decodes)]
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.decodes = [
                stack.enter_context(
                    Remote("scripts.benchmarks.decode_side:DecodeSide", shape, pages, pool.path, "auto", config)
                )
                for pool in self.targets
            ]
            self.where: list[Where] = [decode.call("where") for decode in self.decodes]
            self.side = stack.enter_context(
                PrefillSide(self.source, completion=completion, config=config, engine=engine)
            )
            with quiet():
                self.raw = RawEngine(self.source.layout)
            self.notifiers = [stack.enter_context(_closing(Notifier(where.notices))) for where in self.where]
            for number in range(decodes):
                self._meet(number)
            self._stack = stack.pop_all()

    def _meet(self, number: int) -> None:
        """First contact of both engines with a decode, and of the sockets: never measured."""
        self.raw.meet(self.where[number].session, self.where[number].layout)
        for _ in range(3):
            self.notifiers[number].round_trip()
        hello = requests(1, 1, 1, scattered=False, rng=self.rng, first=1 << 40)
        for _ in range(3):
            self.kvferry(hello, Compute(), decode=number)

    def renew(self, number: int) -> None:
        """Replace a decode's engine and incarnation: to kvferry's prefill it is a stranger."""
        self.where[number] = self.decodes[number].call("renew")

    # -- the sides -----------------------------------------------------------------------------------------------

    def kvferry(
        self, asked: Sequence[Request], compute: Compute, *, decode: int = 0, count_hooks: bool = False
    ) -> Exposed:
        """Send requests through kvferry, layer by layer."""
        gen = next(_generations)
        self.decodes[decode].call("expect", [self.side.address], self.awaited(asked, gen))
        forward = self.side.forward(asked, compute, gen, count_hooks=count_hooks)
        known = self.committed(asked, gen, decode=decode)
        for request in asked:  # a room that is still live here would be superseded by the next run's
            self.side.result(request, gen)
        return Exposed(forward, known)

    def committed(self, asked: Sequence[Request], gen: int, *, decode: int = 0) -> list[float]:
        """Wait for the decode; when it committed each request. Raises RuntimeError for one that failed."""
        keys = [(request.number, gen) for request in asked]
        ended: list[Ended] = self.decodes[decode].call("wait", keys, 60.0, timeout=70.0)
        for end in ended:
            if not end.ok:
                raise RuntimeError(f"a room failed: {end.error}")
        return [end.stamps["committed"] for end in ended]

    def baseline(self, sender: Sender, passes: Sequence[Sequence[Context]], compute: Compute) -> Exposed:
        """The same forwards with a baseline's hooks; it announces the last chunk of every request."""
        start = time.monotonic()
        for contexts in passes:
            sender.begin(contexts)
            run_forward(self.shape.layers, compute, sender.layer_end)
            sender.end()
        forward = Forwarded(start, time.monotonic(), 0.0)
        names = [context.notice for context in passes[-1]]
        known = self.decodes[0].call("noticed", names, 60.0, timeout=70.0)
        if sender.failures:
            raise RuntimeError("a baseline failed") from sender.failures[0]
        return Exposed(forward, known)

    def monolithic(self) -> Monolithic:
        return Monolithic(self.raw, self.where[0].session, self.notifiers[0].announce)

    def threadpool(self, group: int, *, blocking: bool = False) -> ThreadPool:
        return ThreadPool(
            self.raw,
            self.where[0].session,
            self.notifiers[0].announce,
            layers=self.shape.layers,
            group=group,
            blocking=blocking,
        )

    # -- what they send ------------------------------------------------------------------------------------------

    def awaited(self, asked: Iterable[Request], gen: int) -> list[Awaited]:
        size = self.shape.page_size
        return [Awaited(request.number, gen, request.target, request.cuts[-1] * size) for request in asked]

    def blocks(self, request: Request, layers: Sequence[int], part: slice = slice(None), *, decode: int = 0) -> Blocks:
        return blocks_of(
            self.source.layout, self.where[decode].layout, layers, request.source[part], request.target[part]
        )

    @property
    def all_layers(self) -> range:
        return range(self.shape.layers + self.shape.drafts)

    def passes(self, asked: Sequence[Request], group: int) -> list[list[Context]]:
        """For a baseline: by forward, each request's chunk as ``group`` layers at a time, unfired layers last."""
        layers, drafts = self.shape.layers, self.shape.drafts
        groups = [range(first, min(first + group, layers)) for first in range(0, layers, group)]
        groups += [range(layers, layers + drafts)] if drafts else []
        passes: list[list[Context]] = []
        for number in range(len(asked[0].cuts)):
            contexts = []
            for request in asked:
                first = request.cuts[number - 1] if number else 0
                part = slice(first, request.cuts[number])
                last = number == len(request.cuts) - 1
                notice = b"%d/%d" % (request.number, next(_generations)) if last else b""
                blocks = tuple(as_ints(self.blocks(request, chosen, part)) for chosen in groups)
                contexts.append(Context(request.number, blocks, notice))
            passes.append(contexts)
        return passes

    def renamed(self, passes: Sequence[Sequence[Context]]) -> list[list[Context]]:
        """The same passes under names that were not announced yet."""
        return [
            [
                replace(context, notice=b"again/%d" % next(_generations) if context.notice else b"")
                for context in contexts
            ]
            for contexts in passes
        ]

    # -- honesty -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """New content in the source, so that what a run before delivered proves nothing."""
        self.source.refresh(self.rng)

    def refresh_pages(self, pages: Ints) -> None:
        """The same for a few pages."""
        self.source.refresh(self.rng, pages)

    def verify(self, asked: Sequence[Request], *, decode: int = 0, sent_by: str = "kvferry") -> None:
        """Raise WrongBytesError unless the decode holds every byte of these requests."""
        for request in asked:
            wrong = self.source.differences(self.targets[decode], request.source, request.target)
            if wrong:
                raise WrongBytesError(
                    f"sent by {sent_by}: {len(wrong)} of {len(request.source) * self.shape.buffers} (buffer, page) "
                    f"pairs of request {request.number} hold other bytes than the source, the first at {wrong[:8]}"
                )

    def close(self) -> None:
        self._stack.close()
        for pool in (self.source, *self.targets):
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def next_generation() -> int:
    """A generation that no room of this process has had."""
    return next(_generations)


_closing = contextlib.closing
