"""Workloads made from a seed: what `orchestrator.testing.simplan` says, drawn at random.

The seed decides everything, the topology included; two workloads of one seed are equal.
"""

from __future__ import annotations

import random
from typing import Any

from orchestrator.testing.simflight import EngineFaults
from orchestrator.testing.simnet import NetFaults
from orchestrator.testing.simplan import (
    LAYERS,
    PAGE_SIZE,
    AbortPlan,
    FaultKind,
    FaultPlan,
    GroupKind,
    GroupPlan,
    PassEnd,
    PassPlan,
    RoomPlan,
    Workload,
)


def make_workload(seed: int, *, rooms: int | None = None) -> Workload:
    """The workload of a seed. ``rooms``: how many instead of the seed's own choice (8 to 24)."""
    rng = random.Random(f"workload {seed}")
    groups = _make_groups(rng)
    decodes = rng.choice((1, 1, 2, 2, 3))
    count = rooms if rooms is not None else rng.randrange(8, 25)
    span = max(2.0, count * rng.choice((0.1, 0.3, 0.8)))
    config = _make_config(rng)
    plans = _make_rooms(rng, groups, decodes, count, span)
    calm = rng.random() < 0.1
    faults = () if calm else _make_faults(rng, groups, decodes, span)
    return Workload(
        seed=seed,
        order=rng.choice(("domains", "domains", "any")),
        groups=groups,
        decodes=decodes,
        rooms=plans,
        faults=faults,
        config=config,
        net=NetFaults() if calm else _make_net(rng),
        engine=EngineFaults(latency_s=(0.001, 0.01)) if calm else _make_engine(rng),
        no_engine=rng.choice((0.0, 0.0, 0.3)),
        named=rng.random() < 0.8,
    )


def _make_groups(rng: random.Random) -> tuple[GroupPlan, ...]:
    kinds: list[GroupKind] = [
        rng.choice(("single", "single", "cp", "pp", "dummy")) for _ in range(rng.choice((1, 1, 2)))
    ]
    groups: list[GroupPlan] = []
    first = 0
    for kind in kinds:
        size = 1 if kind == "single" else 2
        groups.append(GroupPlan(kind, tuple(range(first, first + size)), zigzag=rng.random() < 0.5))
        first += size
    return tuple(groups)


def _make_config(rng: random.Random) -> dict[str, Any]:
    rare = {"max_kept_offers": 2, "max_kept_pages": 12, "max_peer_tombstones": 3, "admission": True}
    return {
        **{name: value for name, value in rare.items() if rng.random() < 0.08},
        "layerwise": rng.random() < 0.85,
        "layer_group": rng.choice((None, 1, 2, 3)),
        "max_layer_group": rng.choice((1, 2, 8)),
        "digest": rng.random() < 0.3,
        "link_quantum_bytes": rng.choice((8, 64, 1024)),
        "rollover_at_units": rng.choice((1, 4, 12, 1000)),
        "quarantine_limit_units": rng.choice((16, 1000)),
    }


def _make_net(rng: random.Random) -> NetFaults:
    bad = rng.choice((0.0, 0.0, 0.02, 0.1, 0.25))
    return NetFaults(
        delay_s=rng.choice(((0.0002, 0.002), (0.001, 0.05), (0.0002, 0.4))),
        loss=bad * rng.random(),
        duplicate=bad * rng.random(),
        reorder=bad * rng.random(),
        reorder_s=rng.choice((0.05, 1.0, 4.0)),
        reconnect_s=rng.choice(((0.01, 0.1), (0.05, 1.0))),
    )


def _make_engine(rng: random.Random) -> EngineFaults:
    bad = rng.choice((0.0, 0.0, 0.01, 0.05))
    return EngineFaults(
        bytes_per_s=rng.choice((2e2, 2e3, 1e6)),
        latency_s=rng.choice(((0.0005, 0.005), (0.005, 0.1), (0.05, 0.6))),
        connect_s=rng.choice(((0.0, 0.0), (0.01, 0.5))),
        close_s=rng.choice(((0.0, 0.0), (0.1, 1.0))),
        progress_timeout_s=rng.choice((1.0, 2.5)),
        fail=bad,
        late_s=rng.choice(((0.0, 1.0), (0.0, 6.0))),
        ack_lost=bad * rng.random(),
        stuck=bad * rng.choice((0.0, 0.0, 0.3)),
        in_pieces=rng.choice((0.0, 0.3)),
        refuse=bad * rng.random(),
        refuse_rest=bad * rng.random(),
    )


def _make_rooms(
    rng: random.Random, groups: tuple[GroupPlan, ...], decodes: int, count: int, span: float
) -> tuple[RoomPlan, ...]:
    plans: list[RoomPlan] = []
    generations: dict[int, tuple[int, float]] = {}
    aborts = rng.choice((0.05, 0.2, 0.5))
    slow = rng.choice((0.002, 0.05, 0.3))
    for number in range(count):
        at = rng.random() * span
        reused = [room for room, (_, since) in generations.items() if since <= at]
        room = rng.choice(reused) if reused and rng.random() < 0.35 else number + 1
        gen = generations.get(room, (0, 0.0))[0] + 1
        if rng.random() < 0.03 and gen > 1:
            gen -= 1  # a stale generation
        generations[room] = (max(gen, generations.get(room, (0, 0.0))[0]), at)
        plans.append(_make_room(rng, number, room, gen, at, groups, decodes, aborts, slow))
    return tuple(sorted(plans, key=lambda plan: plan.at))


def _make_room(
    rng: random.Random,
    number: int,
    room: int,
    gen: int,
    at: float,
    groups: tuple[GroupPlan, ...],
    decodes: int,
    aborts: float,
    slow: float,
) -> RoomPlan:
    group = rng.randrange(len(groups))
    several = decodes > 1 and rng.random() < 0.4
    chosen = tuple(rng.sample(range(decodes), rng.randrange(2, decodes + 1) if several else 1))
    tokens = rng.choice((1, 3, 6, 9, 12, 16))
    chunks = _cut(rng, tokens)
    whole = tokens // PAGE_SIZE
    prefixes = tuple(rng.randrange(whole + 1) if rng.random() < 0.2 else 0 for _ in chosen)
    late = rng.choice((0.0, 0.05, 0.5, 2.0))
    delays: list[float | None] = [rng.random() * late for _ in (*chosen, None)]
    if rng.random() < 0.05:
        delays[rng.randrange(len(delays))] = None
    hosts = [f"D{n}" for n in chosen] + [f"P{n}" for n in groups[group].prefills]
    asked = [AbortPlan(rng.random() * rng.choice((0.05, 0.5, 3.0)), rng.choice(hosts))] if rng.random() < aborts else []
    if asked and rng.random() < 0.3:
        asked.append(AbortPlan(asked[0].after_s + rng.random() * 0.02, rng.choice(hosts)))
    return RoomPlan(
        number=number,
        room=room,
        gen=gen,
        at=at,
        group=group,
        decodes=chosen,
        tokens=tokens,
        chunks=chunks,
        prefixes=prefixes,
        delays=tuple(delays),
        passes=tuple(_make_pass(rng, slow) for _ in chunks),
        aborts=tuple(asked),
        state_rows=rng.choice((0, 0, 1, 2)),
        use_s=rng.random() * rng.choice((0.01, 1.0)),
        fake=rng.random() < 0.02,
    )


def _cut(rng: random.Random, tokens: int) -> tuple[int, ...]:
    chunks: list[int] = []
    while tokens:
        take = tokens if rng.random() < 0.4 else rng.randrange(1, tokens + 1)
        chunks.append(take)
        tokens -= take
    return tuple(chunks)


def _make_pass(rng: random.Random, slow: float) -> PassPlan:
    dice = rng.random()
    end: PassEnd = "discard" if dice < 0.04 else "raise" if dice < 0.06 else "never" if dice < 0.07 else "end"
    return PassPlan(
        end=end,
        after=rng.randrange(LAYERS + 1),
        missing=tuple(layer for layer in range(LAYERS) if rng.random() < 0.04),
        layer_s=slow * rng.random(),
        formed=rng.choice((1, 1, 1, 1, 3)),
    )


def _make_faults(rng: random.Random, groups: tuple[GroupPlan, ...], decodes: int, span: float) -> tuple[FaultPlan, ...]:
    prefills = [f"P{n}" for group in groups for n in group.prefills]
    receivers = [f"D{n}" for n in range(decodes)]
    weights: dict[FaultKind, int] = {
        "crash": 6,
        "leave": 1,
        "stop": 4,
        "partition": 3,
        "half-open": 1,
        "reset": 2,
        "data-partition": 2,
        "black-hole": 1,
        "rollover": 4,
        "abort-storm": 2,
    }
    faults: list[FaultPlan] = []
    for kind in rng.choices(list(weights), list(weights.values()), k=rng.choice((1, 2, 4, 7))):
        host = rng.choice(receivers if kind in ("rollover", "black-hole") else prefills + receivers)
        pair = kind in ("partition", "half-open", "reset", "data-partition")
        other = rng.choice(receivers if host in prefills else prefills) if pair else ""
        faults.append(
            FaultPlan(
                kind,
                rng.random() * span * 1.2,
                host,
                other,
                seconds=rng.choice((0.05, 0.5, 1.0, 3.0, 8.0)) * (0.5 + rng.random()),
                one_way=rng.random() < 0.4,
                mode=rng.choice(("hold", "drop")),
                for_good=kind == "crash" and rng.random() < 0.1,
            )
        )
    for fault in list(faults):
        if fault.kind == "crash" and fault.host in prefills and rng.random() < 0.5:  # its rooms end while it is away
            away = fault.seconds * rng.choice((0.3, 1.0, 1.5))
            faults.append(FaultPlan("abort-storm", fault.at + rng.random() * away, rng.choice(receivers)))
        if fault.kind == "rollover" and rng.random() < 0.5:  # rooms of both sessions end
            faults.append(FaultPlan("abort-storm", fault.at + rng.random() * 2.0, fault.host))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def probe_rooms(workload: Workload, first_room: int) -> list[RoomPlan]:
    """One small room for every decode and group, to show that all work again."""
    plans: list[RoomPlan] = []
    for group in range(len(workload.groups)):
        for decode in range(workload.decodes):
            plans.append(
                RoomPlan(
                    number=first_room + len(plans),
                    room=first_room + len(plans),
                    gen=1,
                    at=0.0,
                    group=group,
                    decodes=(decode,),
                    tokens=3,
                    chunks=(3,),
                    prefixes=(0,),
                    delays=(0.0, 0.0),
                    passes=(PassPlan(layer_s=0.001),),
                    use_s=0.0,
                    probe=True,
                )
            )
    return plans
