"""What a simulated engine's blocks are and can meet; see `orchestrator.testing.simengine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from orchestrator.engines.base import Batch
from protocols.blocks import Blocks
from protocols.ids import Session

if TYPE_CHECKING:
    from orchestrator.testing.simengine import SimEngine

Fate = Literal["lands", "fails", "fails, then lands", "lands, then fails", "never ends"]


@dataclass(slots=True, kw_only=True)
class EngineFaults:
    """How long things take (seconds, bytes per second) and what goes wrong (probabilities). The default is fast and
    faultless."""

    bytes_per_s: float = 1e10
    latency_s: tuple[float, float] = (0.0, 0.0)
    connect_s: tuple[float, float] = (0.0, 0.0)
    close_s: tuple[float, float] = (0.0, 0.0)
    """How long deleting an engine takes; writes may land until it is over."""
    progress_timeout_s: float = 30.0
    """A batch whose blocks have no verdict this long after they should have left: they FAIL, and may land later."""
    fail: float = 0.0
    """A block is FAILED: before it was read, or with its bytes in the fabric, from where it may land later."""
    late_s: tuple[float, float] = (0.0, 8.0)
    """How long after its verdict such a block lands, and how much later than planned what a dead writer left."""
    ack_lost: float = 0.0
    """A block lands and is FAILED all the same."""
    stuck: float = 0.0
    """A block gets no verdict as long as its target lives; it may have landed, or land much later."""
    in_pieces: float = 0.0
    """A block lands in two parts."""
    refuse: float = 0.0
    """``submit`` raises."""
    refuse_rest: float = 0.0
    """A submission is taken in part."""
    survive: float = 0.7
    """What a killed writer had in the fabric arrives with this probability, block by block."""


class Flight:
    """One block under way."""

    __slots__ = (
        "batch",
        "cancelled",
        "data",
        "delay",
        "dst",
        "fate",
        "index",
        "length",
        "number",
        "src",
        "target",
        "verdict",
    )

    def __init__(self, number: int, batch: SimBatch, index: int, src: int, dst: int, length: int, fate: Fate) -> None:
        self.number = number
        self.batch = batch
        self.index = index
        self.src, self.dst, self.length = src, dst, length
        self.fate: Fate = fate
        self.data: bytes | None = None
        """What was read from the source; None while it is queued."""
        self.target: SimEngine | None = None
        """The engine it is on its way to, known once it has left."""
        self.verdict: str | None = None
        """``COMPLETED``, ``FAILED`` or ``NEVER`` (not submitted), as the writer will hear or has heard."""
        self.delay = 0.0
        """Seconds by which it is held up once more before it lands."""
        self.cancelled = False
        """It will not be read any more."""

    @property
    def writer(self) -> SimEngine:
        return self.batch.engine

    @property
    def session(self) -> Session:
        return self.batch.session

    def __repr__(self) -> str:
        state = "in the fabric" if self.data is not None else "queued"
        return (
            f"<block {self.number} from {self.writer.host}, {state}, {self.verdict or 'no verdict'}, fate: {self.fate}>"
        )


class SimBatch(Batch):
    __slots__ = ("engine", "open")

    def __init__(self, engine: SimEngine, session: Session, blocks: Blocks) -> None:
        super().__init__(session, blocks)
        self.engine = engine
        self.open = set(range(len(blocks)))
        """Indices of blocks whose verdict the writer has not heard."""


class Observer(Protocol):
    """Hears of every byte: the oracle."""

    def on_read(self, flight: Flight) -> None:
        """The source was read into ``flight.data``."""
        ...

    def on_landing(self, flight: Flight, offset: int, nbytes: int) -> None:
        """These bytes of the block are about to be written to ``flight.target``'s memory."""
        ...

    def on_verdict(self, flight: Flight) -> None:
        """The writer's transport knows; the writer will hear of it at its next poll."""
        ...
