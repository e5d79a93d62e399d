"""Cancelled at any await, by anybody: rooms end, books balance, nothing stays (C4, C5, B4; invariant V5).

A run is repeated once for every suspension of every task that the product starts, and that task is cancelled there.
Time is virtual, so a run is the same up to the moment that differs, and waiting for a deadline costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import digest, progress
from orchestrator.clock import LoopClock
from orchestrator.node import Node
from orchestrator.testing.pool import Pool
from orchestrator.testing.virtual import VirtualLoop, run_virtual
from protocols.ids import RoomKey
from tests.cancel.scenes import (
    CONFIG,
    KEY,
    SCENES,
    Run,
    Scene,
    SlowEngine,
    a_run,
    books,
    check_pages,
    ends,
    late_offer,
    nobody_left,
    plain,
    probed,
)
from tests.cancel.stepping import AtStep, Steps, Walk

every_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
both_sides = pytest.mark.parametrize("side", ["prefill", "decode"])
CONNECTING = {"Sender._connect", "Contacts._connect"}
rows = pytest.mark.row("B4", "C4", "C5")


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time; digests that yield at every page; a pacer that does not count virtual seconds in milliseconds."""
    monkeypatch.setattr(LoopClock, "now", lambda self: asyncio.get_running_loop().time())
    monkeypatch.setattr(digest, "SLICE_BYTES", 1)
    monkeypatch.setattr(progress, "SHORTEST_S", 0.001)
    monkeypatch.setattr(progress, "LONGEST_S", 0.25)


async def live_through(loop: VirtualLoop, scene: Scene, at: tuple[int, int] | None = None) -> Steps:
    """One run, one task of it cancelled at one suspension, and every check at the end."""
    steps = Steps(loop, at)
    async with a_run(loop, scene) as run:
        prefill, decodes = await ends(run)
        assert await books(run) == []
        check_pages(run, prefill, decodes)
        if scene in (plain, late_offer):
            assert prefill.ok or at is not None, prefill.error
            if steps.hit is not None and steps.hit.name == "run_chunk":
                assert "cancelled" in str(prefill.error), "at once, not by a deadline"
    assert run.cluster.balanced() == []
    nobody_left(loop)
    return steps


def every_await(live: Callable[[VirtualLoop, tuple[int, int] | None], Any], *names: str) -> set[str]:
    """Live through it undisturbed, then once for each suspension found, of these coroutines if any are named. Returns
    which coroutines there were to cancel."""
    found: list[Walk] = run_virtual(lambda loop: live(loop, None)).product
    found = [walk for walk in found if walk.suspensions and (not names or walk.name in names)]
    for walk in found:
        for suspension in range(1, walk.suspensions + 1):
            at = (walk.ordinal, suspension)
            try:
                steps = run_virtual(lambda loop, at=at: live(loop, at))  # type: ignore[misc]
            except BaseException as exc:
                exc.add_note(f"{walk.where} was cancelled at its suspension {suspension}")
                raise
            assert steps.hit is not None, "the run was another one before anything was cancelled"
    return {walk.name for walk in found}


@rows
@every_scene
def test_any_task_cancelled_at_any_await(scene: Scene) -> None:
    names = CONNECTING if scene is probed else []  # the other tasks do there what they do in the other scenes
    found = every_await(lambda loop, at: live_through(loop, scene, at), *names)
    assert CONNECTING <= found
    if scene is plain:
        assert {"run_chunk", "DecodeRoom._compare"} <= found


@rows
@both_sides
@pytest.mark.parametrize("stride", [pytest.param(17, id="sampled"), pytest.param(1, id="all", marks=pytest.mark.long)])
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES[:4], ids=lambda scene: scene.__name__)
def test_a_node_stopped_at_any_step(scene: Scene, side: str, stride: int) -> None:
    async def live(loop: VirtualLoop, after: int | None) -> int:
        async with a_run(loop, scene) as run:
            first = loop.steps
            node = run.cluster.prefill_nodes[0] if side == "prefill" else run.cluster.decode_nodes[0]
            if after is not None:
                AtStep(loop, first + after, lambda: run.drive(node.stop()))
            prefill, decodes = await ends(run)
            assert await books(run) == []
            check_pages(run, prefill, decodes)
            over = loop.steps - first
        assert run.cluster.balanced() == []
        nobody_left(loop)
        return over

    steps = run_virtual(lambda loop: live(loop, None))
    for after in range(1, steps, stride):
        try:
            run_virtual(lambda loop, after=after: live(loop, after))  # type: ignore[misc]
        except BaseException as exc:
            exc.add_note(f"the {side} was stopped at step {after} of {steps}")
            raise


@rows
@both_sides
@pytest.mark.parametrize("after", [60, 200])
def test_a_stop_cancelled_at_any_await_is_finished_by_the_next(side: str, after: int) -> None:
    async def live(loop: VirtualLoop, at: tuple[int, int] | None) -> Steps:
        steps = Steps(loop, at)
        async with a_run(loop, plain) as run:
            node = run.cluster.prefill_nodes[0] if side == "prefill" else run.cluster.decode_nodes[0]
            stopping: list[asyncio.Task[None]] = []
            AtStep(loop, loop.steps + after, lambda: stopping.append(loop.create_task(node.stop())))
            prefill, decodes = await ends(run)
            await asyncio.gather(*stopping, return_exceptions=True)
            assert stopping
            await node.stop()
            assert await books(run) == []
            check_pages(run, prefill, decodes)
        assert run.cluster.balanced() == []
        nobody_left(loop)
        return steps

    assert every_await(live, "Node.stop") == {"Node.stop"}


@rows
def test_a_rollover_cancelled_at_any_await_leaves_nothing_behind_the_stop() -> None:
    key = RoomKey(60, 1)

    async def live(loop: VirtualLoop, at: tuple[int, int] | None) -> Steps:
        steps = Steps(loop, at)
        async with a_run(loop, plain) as run, Node(network=run.cluster.network) as node:
            fabric, pool = run.cluster.fabric, Pool(pages=32, state_rows=4)
            decode = node.start_decode(
                SlowEngine(fabric.engine()), pool.layout, CONFIG, lambda: SlowEngine(fabric.engine())
            )
            handle = decode.expect(*key, run.cluster.addresses, [4], total_tokens=4, aux_slot=0, state_rows=[0])
            await asyncio.sleep(0.01)
            decode.roll_over()
            await ends(run)
            await asyncio.wait_for(handle, 20.0)
            await asyncio.sleep(5.0)  # the old engine has ended, if it was let
            assert at is not None or (node.receiver is not None and node.receiver.rollover.fences == 1)
            await node.stop()
            assert node.receiver is not None
            assert node.receiver.book.taken() == 0
            assert handle.units_free()
            assert await books(run) == []
        assert run.cluster.balanced() == []
        nobody_left(loop)
        return steps

    assert every_await(live, "EngineRollover._close_old") == {"EngineRollover._close_old"}


@rows
def test_public_waits_may_be_left_at_any_step_and_the_room_never_notices() -> None:
    async def left(loop: VirtualLoop, run: Run, waits: list[asyncio.Task[Any]]) -> None:
        """At every step somebody begins to wait for every outcome there is, and somebody else leaves."""
        prefill = run.cluster.prefill()
        for number in range(200):
            waits += [loop.create_task(_await(handle)) for handle in run.handles]
            if prefill._sender.rooms._outcomes:
                waits.append(loop.create_task(prefill.finished(*KEY)))
            await asyncio.sleep(0 if number % 2 else 0.0005)
            for task in waits[-3:]:
                task.cancel()

    async def live(loop: VirtualLoop) -> None:
        waits: list[asyncio.Task[Any]] = []
        async with a_run(loop, plain) as run:
            run.drive(left(loop, run, waits))
            prefill, decodes = await ends(run)
            assert prefill.ok
            assert all(result.ok for result in decodes)
            assert await books(run) == []
            check_pages(run, prefill, decodes)
            await asyncio.gather(*waits, return_exceptions=True)
            assert sum(task.cancelled() for task in waits) > 100
        nobody_left(loop)

    run_virtual(live)


async def _await(handle: Any) -> Any:
    return await handle
