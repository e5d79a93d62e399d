"""The engine's own calls and nothing else: how fast this wheel moves these blocks on this machine.

Batches are submitted up to a window; a sleeping poll asks the oldest, because asking without a pause takes the core
that the engine's own thread needs (docs/engines.md). Window, batch and pause are the best of a sweep on two cores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.engines import mooncake_abi, mooncake_env
from orchestrator.engines.mooncake_abi import COMPLETED, WAITING, Abi
from protocols.blocks import Blocks
from protocols.ids import Session
from protocols.layout import Layout

Ints = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How a raw sender drives the engine."""

    window: int = 256
    batch: int = 32
    pause_s: float = 0.0003


IDEAL = Pace()


def as_ints(blocks: Blocks) -> Ints:
    return blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist()


class RawEngine:
    """A native engine of its own, with a pool registered. Same settings as kvferry's (``mooncake_env``)."""

    def __init__(self, layout: Layout) -> None:
        module = mooncake_env.load()
        if mooncake_abi.BATCH_STATUS not in mooncake_abi.trusted():
            raise RuntimeError("this wheel's batch status did not pass its self-test: no raw baseline without it")
        self.native: Any = module.TransferEngine()
        code = self.native.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise RuntimeError(f"the baseline's engine did not start ({code})")
        for buffer in layout.buffers:
            if self.native.register_memory(buffer.address, buffer.nbytes) != 0:
                raise RuntimeError(f"the baseline could not register {buffer.name}")
        self.abi = Abi(str(module.__file__), self.native.get_engine_ptr())
        self._scratch = layout.unit_buffers("scratch")[0]

    def meet(self, session: Session, layout: Layout) -> None:
        """First contact, which is never measured."""
        target = layout.unit_buffers("scratch")[0]
        for _ in range(32):  # every lane connects
            self.write_sync(session, ([self._scratch.address], [target.address], [8]))

    def write_sync(self, session: Session, ints: Ints) -> None:
        """The blocking call: spins in the engine without the GIL until all blocks are there."""
        if self.native.batch_transfer_sync_write(session, *ints) != 0:
            raise RuntimeError("a baseline's write failed")

    def write_async(self, session: Session, ints: Ints) -> int:
        """Submit; the batch is somebody's to ask and to free."""
        ident = int(self.native.batch_transfer_async_write(session, *ints))
        if ident == 0:
            raise RuntimeError("the engine refused a baseline's batch")
        return ident

    def wait_spinning(self, idents: list[int]) -> None:
        """The blocking status, which spins; it frees the batches."""
        if idents and self.native.get_batch_transfer_status(idents) != 0:
            raise RuntimeError("a baseline's batch failed")

    def is_done(self, ident: int) -> bool:
        """Ask once; a batch that is done is freed and must not be asked again."""
        state = self.abi.batch_status(ident)
        if state == WAITING:
            return False
        if state != COMPLETED:
            raise RuntimeError("a raw batch failed")
        self.abi.free(ident)
        return True

    def send(self, parts: Sequence[tuple[Session, Blocks]], pace: Pace = IDEAL) -> None:
        """Write all blocks of all sessions, each session with a window of its own. Blocks this thread."""
        streams = [_Stream(session, as_ints(blocks)) for session, blocks in parts]
        while streams:
            moved = False
            for stream in streams:
                moved = stream.advance(self, pace) or moved
            streams = [stream for stream in streams if not stream.over]
            if streams and not moved:
                time.sleep(pace.pause_s)


class _Stream:
    """One session's blocks on their way."""

    def __init__(self, session: Session, ints: Ints) -> None:
        self._session = session
        self._ints = ints
        self._next = 0
        self._open = 0
        self._batches: deque[tuple[int, int]] = deque()

    @property
    def over(self) -> bool:
        return self._next == len(self._ints[0]) and not self._batches

    def advance(self, engine: RawEngine, pace: Pace) -> bool:
        """Free what is done, fill the window. True if anything happened."""
        moved = False
        while self._batches and engine.is_done(self._batches[0][0]):
            self._open -= self._batches.popleft()[1]
            moved = True
        src, dst, length = self._ints
        while self._next < len(src) and self._open < pace.window:
            end = min(self._next + pace.batch, len(src))
            part = slice(self._next, end)
            ident = engine.write_async(self._session, (src[part], dst[part], length[part]))
            self._batches.append((ident, end - self._next))
            self._open += end - self._next
            self._next = end
            moved = True
        return moved
