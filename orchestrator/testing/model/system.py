"""All processes and wires together: which steps a state allows, and where they lead.

A state is a tuple of small numbers, one for each part: decode sides, prefill sides, wires (one for each pair), writes
under way to each decode. Equal parts have equal numbers, so a local step is worked out once, however many states of
the whole contain it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

from orchestrator.testing.model import decode, prefill
from orchestrator.testing.model.bounds import Bounds, Violation
from orchestrator.testing.model.decode import Decode
from orchestrator.testing.model.prefill import Prefill
from orchestrator.testing.model.state import DecodeSide, Effect, Event, Message, PrefillSide, Wire, Writes
from orchestrator.testing.model.writes import engine_changed, orphaned, write_changed
from protocols.errors import KvferryError

T = TypeVar("T", bound=Hashable)
State = tuple[int, ...]


class Parts(Generic[T]):
    """Numbers for equal values."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


@dataclass(slots=True)
class Move:
    """A step of one side: what happened, the number of the new side, and what it does to the rest."""

    who: str
    event: Event
    side: int = -1
    posts: list[tuple[int, int]] = field(default_factory=list)
    """(peer, number of the message)"""
    effects: list[Effect] = field(default_factory=list)
    """What it does to engines, and to writes under way."""
    violation: str = ""


Step = tuple[Move, State | str]
"""A move, and the state of the whole that it leads to or what it violates."""


class System:
    """See the module. ``decode_type`` and ``prefill_type``: the sides, or mutants of them."""

    def __init__(
        self, bounds: Bounds, decode_type: type[Decode] = Decode, prefill_type: type[Prefill] = Prefill
    ) -> None:
        self.bounds = bounds
        self.decode_type = decode_type
        self.prefill_type = prefill_type
        self.decodes: Parts[DecodeSide] = Parts()
        self.prefills: Parts[PrefillSide] = Parts()
        self.wires: Parts[Wire] = Parts()
        self.messages: Parts[Message] = Parts()
        self.writes: Parts[Writes] = Parts()
        self.at_prefill = bounds.decodes
        self.at_wire = self.at_prefill + bounds.prefills
        self.at_writes = self.at_wire + bounds.decodes * bounds.prefills
        self._pairs = [
            (d, p, self.at_wire + d * bounds.prefills + p)
            for d in range(bounds.decodes)
            for p in range(bounds.prefills)
        ]
        self._moves: dict[tuple[int, int, Event], Move] = {}
        self._choices: list[dict[int, list[Move]]] = [{} for _ in range(self.at_wire)]
        self._pair_moves: dict[tuple[int, int, int, int, int], list[tuple[int, Move, int]]] = {}
        self._linked: dict[tuple[int, int, int, int], tuple[bool, bool]] = {}
        self._appended: dict[tuple[int, int, bool], int] = {}
        self._written: dict[tuple[Any, ...], int] = {}
        self._cut: dict[tuple[int, bool, bool], list[int]] = {}
        self._faults: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
        self._idle: dict[tuple[bool, int], bool] = {}
        self.nothing_sent = self.wires.number(Wire())
        self.nothing_written = self.writes.number(frozenset())

    def start(self) -> State:
        bounds = self.bounds
        decodes = [self.decodes.number(decode.fresh(bounds))] * bounds.decodes
        prefills = [self.prefills.number(prefill.fresh(bounds))] * bounds.prefills
        wires = [self.nothing_sent] * (bounds.decodes * bounds.prefills)
        return (*decodes, *prefills, *wires, *[self.nothing_written] * bounds.decodes)

    def wire_at(self, d: int, p: int) -> int:
        return self.at_wire + d * self.bounds.prefills + p

    def in_flight(self, state: State) -> int:
        values = self.wires.values
        count = 0
        for number in state[self.at_wire : self.at_writes]:
            if number:
                wire = values[number]
                count += len(wire[0]) + len(wire[1])
        return count

    def is_idle(self, state: State) -> bool:
        """An end: no room is live, no unit is leased, no write is under way, no engine is being replaced, nothing is
        sent."""
        if any(state[self.at_wire : self.at_writes]) or any(state[self.at_writes :]):
            return False
        return all(self._is_idle_side(at < self.at_prefill, state[at]) for at in range(self.at_wire))

    def _is_idle_side(self, is_decode: bool, side: int) -> bool:
        known = self._idle.get((is_decode, side))
        if known is None:
            value = self.decodes.values[side] if is_decode else self.prefills.values[side]
            known = self._idle[is_decode, side] = value.is_idle
        return known

    # -- steps of one side ---------------------------------------------------------------------------------------

    def move(self, at: int, side: int, event: Event) -> Move:
        """What the event does at the side in this place of the state."""
        known = self._moves.get((at, side, event))
        if known is None:
            known = self._moves[at, side, event] = self._worked_out(at, side, event)
        return known

    def _worked_out(self, at: int, side: int, event: Event) -> Move:
        is_decode = at < self.at_prefill
        move = Move(f"decode {at}" if is_decode else f"prefill {at - self.at_prefill}", event)
        try:
            if event == ("crash",):
                self._restarted(move, at, side)
                return move
            if is_decode:
                thawed: Decode | Prefill = self.decode_type(self.bounds, self.decodes.values[side])
            else:
                thawed = self.prefill_type(self.bounds, at - self.at_prefill, self.prefills.values[side])
            thawed.take(event)
            frozen = thawed.freeze()
            move.side = self.decodes.number(frozen) if isinstance(frozen, DecodeSide) else self.prefills.number(frozen)
            for effect in thawed.effects:
                if effect.message is not None:
                    move.posts.append((effect.peer, self.messages.number(effect.message)))
                else:
                    move.effects.append(effect)
        except Violation as exc:
            move.violation = str(exc)
        except KvferryError as exc:
            move.violation = f"{type(exc).__name__}: {exc}"
        return move

    def _restarted(self, move: Move, at: int, side: int) -> None:
        if at < self.at_prefill:
            dec = self.decodes.values[side]
            move.side = self.decodes.number(decode.fresh(self.bounds, dec.incarnation + 1, dec))
        else:
            pre = self.prefills.values[side]
            move.side = self.prefills.number(prefill.fresh(self.bounds, pre.incarnation + 1, pre))

    def choices(self, at: int, side: int) -> list[Move]:
        """What the side in this place may do by itself."""
        known = self._choices[at].get(side)
        if known is None:
            if at < self.at_prefill:
                events = list(self.decode_type(self.bounds, self.decodes.values[side]).choices())
            else:
                events = list(
                    self.prefill_type(self.bounds, at - self.at_prefill, self.prefills.values[side]).choices()
                )
            known = self._choices[at][side] = [self.move(at, side, event) for event in events]
        return known

    # -- how two sides stand to each other -----------------------------------------------------------------------

    def linked(self, d: int, p: int, side_d: int, side_p: int) -> tuple[bool, bool]:
        """Whether what the decode posts reaches the prefill's link, and the reverse."""
        known = self._linked.get((d, p, side_d, side_p))
        if known is None:
            dec, pre = self.decodes.values[side_d], self.prefills.values[side_p]
            near, far = dec.links[p], pre.links[d]
            same = near is not None and far is not None and (far.peer, far.dial) == (dec.incarnation, near.dial)
            down = same and near is not None and near.up and near.peer == pre.incarnation
            known = self._linked[d, p, side_d, side_p] = (down, same and near is not None and (down or not near.up))
        return known

    def _moves_between(self, d: int, p: int, side_d: int, side_p: int, number: int) -> list[tuple[int, Move, int]]:
        """Deliveries and greetings: where the move takes place, the move, the number of the wire before its posts."""
        wire = self.wires.values[number]
        dec, pre = self.decodes.values[side_d], self.prefills.values[side_p]
        near, far = dec.links[p], pre.links[d]
        at_p = self.at_prefill + p
        found: list[tuple[int, Move, int]] = []
        if wire.to_prefill and far is not None:
            rest = self.wires.number(Wire(wire.to_prefill[1:], wire.to_decode))
            found.append((at_p, self.move(at_p, side_p, ("receive", d, wire.to_prefill[0])), rest))
        if near is None:
            return found
        if wire.to_decode and near.up:
            rest = self.wires.number(Wire(wire.to_prefill, wire.to_decode[1:]))
            found.append((d, self.move(d, side_d, ("receive", p, wire.to_decode[0])), rest))
        if near.up and not self.linked(d, p, side_d, side_p)[0]:  # WrongIncarnation, or Refused: say Hello first
            why = "gone" if near.peer != pre.incarnation else "refused"
            found.append((d, self.move(d, side_d, (why, p)), 0))
        elif not near.up and far is not None and (far.peer, far.dial) == (dec.incarnation, near.dial):
            found.append((d, self.move(d, side_d, ("up", p, pre.incarnation)), number))
        elif not near.up:
            for session in near.said:
                hello = ("hello", d, dec.incarnation, near.dial, session)
                found.append((at_p, self.move(at_p, side_p, hello), 0))
        return found

    # -- steps of the whole --------------------------------------------------------------------------------------

    def steps(self, state: State) -> list[Step]:
        """Every step that the state allows. Nothing breaks and nobody interferes while nothing is under way: it would
        differ from the same before or after in names only."""
        found: list[Step] = []
        idle = self.is_idle(state)
        now = self.in_flight(state)
        most = self.bounds.in_flight - now if now else 1 << 30
        for at in range(self.at_wire):
            for move in self.choices(at, state[at]):
                if (not move.posts or len(move.posts) <= most) and not (idle and move.event[0] == "roll over"):
                    found.append((move, self._after(state, at, move)))  # noqa: PERF401
        for d, p, at_wire in self._pairs:
            pair = (d, p, state[d], state[self.at_prefill + p], state[at_wire])
            moves = self._pair_moves.get(pair)
            if moves is None:
                moves = self._pair_moves[pair] = self._moves_between(*pair)
            for at, move, wire in moves:
                base = state if wire == state[at_wire] else _put(state, at_wire, wire)
                found.append((move, self._after(base, at, move)))
        if not idle:
            self._add_faults(state, found)
        return found

    def _after(self, state: State, at: int, move: Move) -> State | str:
        if move.violation:
            return move.violation
        if not move.posts and not move.effects:
            return (*state[:at], move.side, *state[at + 1 :])
        after = list(state)
        after[at] = move.side
        to_prefill = at < self.at_prefill
        for peer, message in move.posts:
            d, p = (at, peer) if to_prefill else (peer, at - self.at_prefill)
            if self.linked(d, p, after[d], after[self.at_prefill + p])[not to_prefill]:
                wire = self.at_wire + d * self.bounds.prefills + p
                after[wire] = self._append(after[wire], message, to_prefill)
        for effect in move.effects:
            if effect.kind == "succeeded":
                if any(self.decodes.values[side].history[effect.gen - 1] != "ok" for side in state[: self.at_prefill]):
                    return f"V4: {move.who} reports success of gen {effect.gen}, and a decode has not committed it"
                continue
            d = at if to_prefill else effect.peer
            here = self.at_writes + d
            key = (after[here], state[d], at - self.at_prefill, effect)
            number = self._written.get(key)
            if number is None:
                number = self._written[key] = self.writes.number(self._changed(*key))
            after[here] = number
        return tuple(after)

    def _append(self, wire: int, message: int, to_prefill: bool) -> int:
        known = self._appended.get((wire, message, to_prefill))
        if known is None:
            there, back = self.wires.values[wire]
            posted = self.messages.values[message]
            longer = Wire((*there, posted), back) if to_prefill else Wire(there, (*back, posted))
            known = self._appended[wire, message, to_prefill] = self.wires.number(longer)
        return known

    def _changed(self, writes: int, side_d: int, rank: int, effect: Effect) -> Writes:
        before, dec = self.writes.values[writes], self.decodes.values[side_d]
        if effect.kind in ("deleted", "listens"):
            return engine_changed(before, effect)
        old = dec.rollover
        alive = effect.session == dec.session or (effect.session == old.old and old.engine in ("alive", "deleting"))
        return write_changed(before, rank, effect, alive)

    # -- faults --------------------------------------------------------------------------------------------------

    def _add_faults(self, state: State, found: list[Step]) -> None:
        sides = state[: self.at_wire]
        faults = self._faults.get(sides)
        if faults is None:
            faults = self._faults[sides] = self._possible_faults(sides)
        for kind, d, p in faults:
            match kind:
                case "decode crashes":
                    self._crash_decode(state, d, found)
                case "prefill crashes":
                    self._crash_prefill(state, p, found)
                case _:
                    self._give_up(state, d, p, found)

    def _possible_faults(self, sides: State) -> list[tuple[str, int, int]]:
        bounds = self.bounds
        decodes = [self.decodes.values[side] for side in sides[: self.at_prefill]]
        prefills = [self.prefills.values[side] for side in sides[self.at_prefill :]]
        found: list[tuple[str, int, int]] = []
        if sum(dec.incarnation for dec in decodes) < bounds.decode_crashes:
            found += [("decode crashes", d, 0) for d in range(bounds.decodes)]
        if sum(pre.incarnation for pre in prefills) < bounds.prefill_crashes:
            found += [("prefill crashes", 0, p) for p in range(bounds.prefills)]
        if sum(dec.broken for dec in decodes) + sum(pre.broken for pre in prefills) < bounds.give_ups:
            for d, p, _ in self._pairs:
                if self.linked(d, p, sides[d], sides[self.at_prefill + p])[0]:
                    found.append(("give up", d, p))
        return found

    def _cuts(self, number: int, there: bool, back: bool) -> list[int]:
        """The wire with what was posted in these directions lost, from some message on."""
        known = self._cut.get((number, there, back))
        if known is None:
            wire = self.wires.values[number]
            kept_there = range(len(wire.to_prefill) + 1) if there else [0]
            kept_back = range(len(wire.to_decode) + 1) if back else [0]
            known = self._cut[number, there, back] = [
                self.wires.number(Wire(wire.to_prefill[:n], wire.to_decode[:m])) for n in kept_there for m in kept_back
            ]
        return known

    def _crash_decode(self, state: State, d: int, found: list[Step]) -> None:
        """The end of the process is a fence. What it had sent may still be delivered, up to some message."""
        move = self.move(d, state[d], ("crash",))
        base = list(state)
        base[d] = move.side
        at = self.at_writes + d
        if self.writes.values[state[at]]:
            base[at] = self.writes.number(
                frozenset(w._replace(reaches=False) for w in self.writes.values[state[at]] if w.running)
            )
        wires = [self.wire_at(d, p) for p in range(self.bounds.prefills)]
        for kept in product(*(self._cuts(state[wire], True, False) for wire in wires)):
            after = list(base)
            for wire, number in zip(wires, kept, strict=True):
                after[wire] = number
            found.append((move, tuple(after)))

    def _crash_prefill(self, state: State, p: int, found: list[Step]) -> None:
        """No fence: what it was writing may land. What it had sent is lost from some message on, when the decode
        learns that it is gone; what was sent to it is answered WrongIncarnation."""
        at_p = self.at_prefill + p
        move = self.move(at_p, state[at_p], ("crash",))
        after = list(state)
        after[at_p] = move.side
        for d in range(self.bounds.decodes):
            wire, here = self.wire_at(d, p), self.at_writes + d
            if after[wire]:
                after[wire] = self.wires.number(Wire((), self.wires.values[state[wire]].to_decode))
            if self.writes.values[after[here]]:
                after[here] = self.writes.number(orphaned(self.writes.values[after[here]], p))
        found.append((move, tuple(after)))

    def _give_up(self, state: State, d: int, p: int, found: list[Step]) -> None:
        """A side forgets a link although the peer is well; the other learns it from a refusal, or from a new Hello."""
        wire, at_p = self.wire_at(d, p), self.at_prefill + p
        move = self.move(d, state[d], ("give up", p))
        cuts = self._cuts(state[wire], True, False)
        found += [(move, self._after(_put(state, wire, number), d, move)) for number in cuts]
        move = self.move(at_p, state[at_p], ("give up", d))
        cuts = self._cuts(state[wire], False, True)
        found += [(move, self._after(_put(state, wire, number), at_p, move)) for number in cuts]


def _put(state: State, at: int, number: int) -> State:
    return (*state[:at], number, *state[at + 1 :])
