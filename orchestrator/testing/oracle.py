"""The byte oracle: who may write which destination byte with which content, and when a source byte is final.

It knows what the embedders did (which unit belongs to which room from when to when) and hears of every read and every
landing. Nothing of the product is asked: what the product believes is what is being judged. A violation names the
invariant (V1 bytes, V2 source, V3 destination, V4 one outcome, V5 in doubt, V8 nothing left), when and what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from orchestrator.testing.simengine import SimEngine
from orchestrator.testing.simfabric import SimFabric
from orchestrator.testing.simflight import Flight
from orchestrator.testing.simmemory import TOKEN_BYTES, Item, Memory, describe_token, pack, unpack
from orchestrator.testing.virtual import Domain
from protocols.ids import RoomKey

Unit = tuple[str, int]
"""(kind, index): ``page``, ``aux`` or ``state``."""
MAX_VIOLATIONS = 20


@dataclass(frozen=True, slots=True)
class Violation:
    """``name`` is what shrinking compares: the invariant and what broke it, without numbers."""

    name: str
    text: str
    at: float

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(slots=True, eq=False)
class Grant:
    """Units that an embedder gave to a room, on one side of it. ``positions`` tells what each unit stands for."""

    key: RoomKey
    owner: str
    positions: dict[Unit, int]
    state: str = "leased"
    """``leased``, ``committed`` (decode) or ``released``."""
    landed: set[tuple[int, int]] = field(default_factory=set)
    """(buffer id, index) of items that something landed in."""


class Side:
    """What the oracle knows of one life of a process."""

    def __init__(self, name: str, memory: Memory) -> None:
        self.name = name
        self.memory = memory
        self.units: dict[Unit, Grant] = {}
        self.outcomes: dict[RoomKey, str] = {}
        self.final: dict[tuple[int, int], int] = {}
        """Prefill: (buffer id, index) → the token that is final there."""


class Oracle:
    """See the module. One for each simulated world."""

    def __init__(self, fabric: SimFabric, now: Callable[[], float], record: Callable[..., object]) -> None:
        self.violations: list[Violation] = []
        self.commits = 0
        self.checked_landings = 0
        self._fabric = fabric
        self._now = now
        self._record = record
        self._sides: dict[Domain, Side] = {}
        self._final: dict[tuple[RoomKey, int, int], dict[str, int]] = {}
        """(room, buffer code, position) → the token that each prefill process wrote last: ranks may compute alike."""
        self._committed: dict[RoomKey, int] = {}
        fabric.observer = self

    # -- what the embedders tell -----------------------------------------------------------------------------------

    def side(self, domain: Domain, name: str, memory: Memory) -> Side:
        """A process has begun."""
        side = self._sides[domain] = Side(name, memory)
        return side

    def granted(self, side: Side, key: RoomKey, units: Iterable[tuple[Unit, int]]) -> Grant:
        """The decode's embedder takes units (with the positions they stand for) for a room."""
        grant = Grant(key, side.name, dict(units))
        for unit in grant.positions:
            holder = side.units.get(unit)
            assert holder is None, f"the harness gave {unit} to {key} although {holder} has it"
            side.units[unit] = grant
        self._check_no_writer(side, grant, "V3 granted under a write")
        return grant

    def committed(self, side: Side, grant: Grant) -> None:
        """The decode says SUCCESS: all of it must be there, equal to what the prefill wrote, and nothing under way."""
        self.commits += 1
        self._committed[grant.key] = self._committed.get(grant.key, 0) + 1
        grant.state = "committed"
        memory = side.memory
        for unit, position in grant.positions.items():
            for item in memory.items_of(*unit):
                found = memory.read(item)
                wanted = self._final.get((grant.key, memory.code(item.buffer), position), {})
                if found not in wanted.values():
                    wrote = ", ".join(f"{name} wrote {describe_token(number)}" for name, number in wanted.items())
                    self.violate(
                        "V1 committed without its bytes",
                        f"{side.name} committed room {grant.key}: {item} (position {position}) holds "
                        f"{describe_token(found)}; {wrote or 'nobody wrote it'}",
                    )
        self._check_no_writer(side, grant, "V3 committed under a write")

    def released(self, side: Side, grant: Grant) -> None:
        """The decode says that the units of a failed room may be given to another, or a committed one is used up."""
        if grant.state == "leased":
            self._check_no_writer(side, grant, "V3 freed under a write")
        self._forget(side, grant)

    def source_granted(self, side: Side, key: RoomKey, units: Iterable[tuple[Unit, int]]) -> Grant:
        """The prefill's embedder takes units for a room."""
        grant = Grant(key, side.name, dict(units))
        for unit in grant.positions:
            assert unit not in side.units, f"the harness gave {unit} twice"
            side.units[unit] = grant
        return grant

    def wrote(self, side: Side, key: RoomKey, item: Item, position: int, attempt: int) -> None:
        """A kernel of the prefill's forward has written an item: it is final now."""
        memory, place = side.memory, (item.buffer.id, item.nth)
        number = pack(key, memory.code(item.buffer), position, attempt)
        if side.final.get(place, number) != number:
            self._check_no_reader(side, {item.unit}, "V2 rewritten under a read")
        memory.write(item, number)
        side.final[place] = number
        self._final.setdefault((key, memory.code(item.buffer), position), {})[side.name] = number

    def source_released(self, side: Side, grant: Grant, poison: int) -> None:
        """The prefill says that the source is free: it is overwritten at once."""
        self._check_no_reader(side, set(grant.positions), "V2 source freed under a read")
        for unit in grant.positions:
            for item in side.memory.items_of(*unit):
                side.memory.write(item, poison)
                side.final.pop((item.buffer.id, item.nth), None)
        self._forget(side, grant)

    def ended(self, side: Side, key: RoomKey, outcome: str) -> None:
        """A room has an outcome on this side."""
        before = side.outcomes.setdefault(key, outcome)
        if before != outcome:
            self.violate("V4 two outcomes", f"room {key} ended {before} and then {outcome} at {side.name}")

    def prefill_succeeded(self, side: Side, key: RoomKey, destinations: int) -> None:
        """The prefill says SUCCESS: every decode must have committed."""
        if self._committed.get(key, 0) < destinations:
            self.violate(
                "V4 success before commit",
                f"{side.name} reports success of room {key}, {self._committed.get(key, 0)} of {destinations} committed",
            )

    def _forget(self, side: Side, grant: Grant) -> None:
        grant.state = "released"
        for unit in grant.positions:
            if side.units.get(unit) is grant:
                del side.units[unit]

    # -- what the fabric tells -------------------------------------------------------------------------------------

    def on_read(self, flight: Flight) -> None:
        side = self._side_of(flight.writer)
        if side is None or flight.data is None:
            return
        for item in side.memory.items_at(flight.src, flight.length):
            found = side.memory.read(item)
            grant = side.units.get(item.unit)
            if grant is None:
                self.violate("V2 read after free", f"{flight!r} read {side.name}'s {item}, which belongs to no room")
            elif side.final.get((item.buffer.id, item.nth)) != found or not self._is_of(found, grant.key):
                self.violate(
                    "V2 read before final",
                    f"{flight!r} read {side.name}'s {item} of room {grant.key}, which holds {describe_token(found)}",
                )

    def on_landing(self, flight: Flight, offset: int, nbytes: int) -> None:
        target = flight.target
        side = self._side_of(target) if target is not None else None
        if side is None or flight.data is None:
            return
        self.checked_landings += 1
        begin = flight.dst + offset
        for item in side.memory.items_at(begin, nbytes):
            at = max(item.address, begin) - flight.dst
            number = int.from_bytes(flight.data[at : at + TOKEN_BYTES], "little")
            self._judge(flight, side, item, number, whole=item.address >= begin)

    def on_verdict(self, flight: Flight) -> None:
        if flight.verdict != "COMPLETED":
            self._record(flight.writer.host, f"hears {flight.verdict} of", flight)

    def _judge(self, flight: Flight, side: Side, item: Item, number: int, *, whole: bool) -> None:
        grant = side.units.get(item.unit)
        what = f"{flight!r} lands in {side.name}'s {item} with {describe_token(number)}"
        if grant is None:
            self.violate("V3 landed in a free unit", what)
            return
        if grant.state == "committed":
            self.violate("V3 landed after commit", f"{what}; room {grant.key} is committed there")
            return
        token = unpack(number)
        position = grant.positions[item.unit]
        if token is None:
            self.violate("V2 stale bytes landed", f"{what}; room {grant.key} expects position {position}")
        elif token.key != grant.key:
            self.violate("V3 landed in another room's unit", f"{what}; it belongs to room {grant.key}")
        elif token.buffer != side.memory.code(item.buffer) or token.position != position:
            self.violate("V1 landed in the wrong place", f"{what}; position {position} belongs there")
        elif whole and (item.buffer.id, item.nth) in grant.landed:
            self.violate("V1 landed twice", what)
        if whole:
            grant.landed.add((item.buffer.id, item.nth))

    def _is_of(self, number: int, key: RoomKey) -> bool:
        token = unpack(number)
        return token is not None and token.key == key

    def _side_of(self, engine: SimEngine) -> Side | None:
        return self._sides.get(engine.domain) if engine.domain is not None else None

    # -- checks ----------------------------------------------------------------------------------------------------

    def _check_no_writer(self, side: Side, grant: Grant, name: str) -> None:
        for flight in self._fabric.live.values():
            engine = flight.target if flight.target is not None else self._fabric.find(flight.session)
            if engine is None or engine.closed or self._side_of(engine) is not side:
                continue
            for item in side.memory.items_at(flight.dst, flight.length):
                if item.unit in grant.positions:
                    self.violate(name, f"{flight!r} may still land in {side.name}'s {item}, room {grant.key}")
                    return

    def _check_no_reader(self, side: Side, units: Collection[Unit], name: str) -> None:
        for flight in self._fabric.live.values():
            if flight.data is None and self._side_of(flight.writer) is side:
                for item in side.memory.items_at(flight.src, flight.length):
                    if item.unit in units:
                        self.violate(name, f"{flight!r} may still read {side.name}'s {item}")
                        return

    def violate(self, name: str, text: str) -> None:
        """Record a violation; beyond `MAX_VIOLATIONS` they are only echoes of the first."""
        self._record("ORACLE", name, text)
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(name, text, self._now()))
