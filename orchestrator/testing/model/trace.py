"""A counterexample as one reads it: what happened, one line a step, and where everything stands at the end."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.testing.model.explore import Result
from orchestrator.testing.model.state import DecodeSide, Event, Message, PrefillRoom, PrefillSide, Wire, Writes
from orchestrator.testing.model.system import Move, State, System


def lines(system: System, result: Result, *, detailed: bool = False) -> Iterator[str]:
    """The violation with the steps that lead to it. ``detailed``: with where everything stands after each of them."""
    yield f"{result.name}: {result.violation}"
    for number, (move, state) in enumerate(result.trace, 1):
        yield f"{number:4}  {move.who:<10} {said(move.event)}"
        for peer, message in move.posts:
            yield f"{'':16}   → {_peer_of(move)} {peer}: {system.messages.values[message]}"
        if not state:
            yield "      This step must not be."
        elif detailed or number == len(result.trace):
            yield from where_all_stands(system, state)
    if not result.trace:
        yield from where_all_stands(system, system.start())


def where_all_stands(system: System, state: State) -> Iterator[str]:
    """One line for each thing that there is."""
    for d, side in enumerate(state[: system.at_prefill]):
        yield from (f"      decode {d}: {text}" for text in _decode(system.decodes.values[side]))
    for p, side in enumerate(state[system.at_prefill : system.at_wire]):
        yield from (f"      prefill {p}: {text}" for text in _prefill(system.prefills.values[side]))
    for d in range(system.bounds.decodes):
        for p in range(system.bounds.prefills):
            yield from _wire(d, p, system.wires.values[state[system.wire_at(d, p)]])
        yield from _writes(d, system.writes.values[state[system.at_writes + d]])


def _peer_of(move: Move) -> str:
    return "prefill" if move.who.startswith("decode") else "decode"


def said(event: Event) -> str:
    """One event in words."""
    match event:
        case ("expect", gen, pages):
            return f"expects gen {gen} in pages {list(pages)}"
        case ("fail", gen):
            return f"ends gen {gen}: an abort, a deadline, a silent peer"
        case ("call abort", gen):
            return f"a thread aborts gen {gen}; the loop has not heard of it"
        case ("carry out abort", gen):
            return f"the loop carries out the abort of gen {gen}"
        case ("ack deadline", gen):
            return f"waits no longer for the acknowledgements of gen {gen}"
        case ("roll over", session, needed):
            return f"rolls over to session {session}" + (": units are quarantined" if needed else ": an operator asked")
        case ("expire",):
            return "the old session's deadline passes"
        case ("deleted",):
            return "the old engine is deleted"
        case ("give up", peer):
            return f"gives up its link with {peer}, though that is well"
        case ("refused", peer):
            return f"is refused by prefill {peer}, which has forgotten it"
        case ("gone", peer):
            return f"learns that prefill {peer} was restarted"
        case ("up", peer, _):
            return f"is welcomed by prefill {peer}"
        case ("hello", peer, incarnation, dial, session):
            return f"hears Hello of decode {peer} (incarnation {incarnation}, dial {dial}, session {session})"
        case ("receive", peer, Message() as message):
            return f"← {peer}: {message}"
        case ("crash",):
            return "crashes and is started again"
        case ("register", gen):
            return f"the scheduler registers gen {gen}"
        case ("skip", gen):
            return f"the scheduler runs gen {gen}, which asks for no transfer"
        case ("abort early", gen):
            return f"a thread aborts gen {gen}, of which nothing is known here"
        case ("ready", gen):
            return f"is ready to send gen {gen}"
        case ("submit", gen, decode, page):
            return f"submits page {page} of gen {gen} to decode {decode}"
        case ("completed", gen, decode, page):
            return f"page {page} of gen {gen} at decode {decode}: COMPLETED"
        case ("write failed", gen, decode, page):
            return f"page {page} of gen {gen} at decode {decode}: FAILED (and may land later)"
        case ("drain deadline", gen):
            return f"waits no longer for the writes of gen {gen}"
    return repr(event)


def _decode(side: DecodeSide) -> Iterator[str]:
    session = f"incarnation {side.incarnation}, session {side.session}"
    rolling = side.rollover
    if rolling.old is not None:
        session += f", rollover {rolling.state.name} (session {rolling.old} {rolling.engine}"
        session += f", waits for {sorted(rolling.awaited)})" if rolling.awaited else ")"
    yield session
    for n, room in enumerate(side.rooms):
        if room is not None:
            ranks = ", ".join(f"{p}: {_rank(rank.dial, rank.covered)}" for p, rank in enumerate(room.ranks))
            yield f"gen {n + 1} {room.state.name}, outcome {room.outcome or 'open'}; ranks {ranks}"
        elif side.history[n]:
            yield f"gen {n + 1} is over" + ("" if side.history[n] == "over" else f": {side.history[n]}")
    for lease in side.leases:
        units = ", ".join(f"page {page} {state.name}" for page, state in lease.by_page())
        waits = f", waits for {sorted(lease.waiting)}" if lease.waiting else ""
        unknown = "".join(f", prefill {rank} cannot tell {list(pages)}" for rank, pages in lease.unknown)
        yield f"lease of gen {lease.gen} (session {lease.session}): {units}{waits}{unknown}"


def _rank(dial: int, covered: tuple[int, ...] | None) -> str:
    return "not offered" if not dial else "offered" if covered is None else f"done with {list(covered)}"


def _prefill(side: PrefillSide) -> Iterator[str]:
    links = (f"{d}: " + (f"session {link.session}" if link else "none") for d, link in enumerate(side.links))
    yield f"incarnation {side.incarnation}, links {', '.join(links)}"
    for n, room in enumerate(side.rooms):
        if isinstance(room, PrefillRoom):
            yield f"gen {n + 1} {room.state.name}, outcome {room.outcome or 'open'}"
            for d, destination in enumerate(room.destinations):
                if destination is not None:
                    blocks = ", ".join(f"page {page} {block}" for page, block in destination.blocks)
                    yield f"gen {n + 1} to decode {d} (session {destination.session}): {blocks or 'nothing yet'}"
        elif room is not None:
            yield f"gen {n + 1} is over" + (f": {room.outcome}" if room.outcome else "")


def _wire(d: int, p: int, wire: Wire) -> Iterator[str]:
    if wire.to_prefill:
        yield f"      under way, decode {d} to prefill {p}: {', '.join(map(str, wire.to_prefill))}"
    if wire.to_decode:
        yield f"      under way, prefill {p} to decode {d}: {', '.join(map(str, wire.to_decode))}"


def _writes(d: int, writes: Writes) -> Iterator[str]:
    for write in sorted(writes):
        kind = "runs" if write.running else "FAILED, or its writer died"
        what = f"write to page {write.page} of decode {d} by prefill {write.rank} for gen {write.gen}"
        yield f"      {what}: {kind}" + ("" if write.reaches else "; its engine is deleted")
