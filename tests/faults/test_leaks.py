"""Peers that come and go leave no connection behind in the process that wrote to them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engines.mooncake import MooncakeEngine
from orchestrator.engines.mooncake_env import lanes
from scripts.soaking.process import Worker
from tests.faults.scenes import CONFIG, PAGE, POOL, PrefillHere, asked
from tests.support.waiting import until

pytestmark = [pytest.mark.mooncake, pytest.mark.timeout(60)]

CLOSE_WAIT = "08"
"""The peer has ended, and we have not noticed."""


def half_open() -> set[str]:
    """Connections of this process whose other end is gone."""
    ours = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            ours.add(str(fd.readlink()))
        except OSError:
            continue  # closed meanwhile
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[9] for row in rows if row[3] == CLOSE_WAIT} & {name[8:-1] for name in ours}


def over(number: int, tables: dict[str, Any]) -> bool:
    """So many rollovers are behind the decode."""
    return bool(tables["fences"] == number and tables["rollover"] == "IDLE")


async def serve(prefill: PrefillHere, decode: Worker, room: int) -> None:
    """A room that uses every connection to its peer."""
    pages = [number for number in range(0, 64, 4)]  # no two are neighbours: many blocks
    await decode.call("expect", room=room, gen=1, peers=[prefill.address], tokens=len(pages) * PAGE)
    prefill.forward(room, 1, pages)
    assert (await decode.call("ended", room=room, gen=1))["ok"]
    await decode.call("recycle", room=room, gen=1)


@pytest.mark.row("B4")
async def test_the_idle_connections_to_a_decode_that_was_killed_are_closed() -> None:
    settings, before = CONFIG | {"name": "decode-7"}, half_open()
    async with PrefillHere() as prefill:
        async with Worker("decode", pool=POOL, config=settings) as first:
            await serve(prefill, first, 1)
        await until(lambda: len(half_open() - before) > 1, f"up to {lanes(os.environ)} connections lie idle")
        async with Worker("decode", pool=POOL, config=settings) as second:
            await serve(prefill, second, 2)
            await until(lambda: not half_open() - before, "they are closed")
            engine = prefill.sender.engine
            assert isinstance(engine, MooncakeEngine)
            assert engine._connected == {second.started["session"]}
            await until(lambda: engine.pending == 0 and not prefill.sender._tasks)
            await serve(prefill, second, 3)


@pytest.mark.row("N11")
async def test_the_idle_connections_to_an_engine_that_was_rolled_over_are_closed() -> None:
    before = half_open()
    async with PrefillHere() as prefill, Worker("decode", pool=POOL, config=CONFIG) as decode:
        for number in range(1, 4):
            await serve(prefill, decode, number)
            await decode.call("roll_over")
            tables = await asked(decode, "tables", partial(over, number))
            assert tables["session"] != decode.started["session"]
            assert not half_open() - before, "before it says that it is done with the old engine"
        await serve(prefill, decode, 9)
