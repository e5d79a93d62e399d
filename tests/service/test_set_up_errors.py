"""What goes wrong before a chunk runs: its room fails, or goes after its forward; nobody else notices (A10)."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest

import orchestrator.chunk
import orchestrator.destination
import orchestrator.prefill
import orchestrator.prefill_room
import orchestrator.sender
from orchestrator.chunk import Chunk, ChunkSpec
from orchestrator.cuda_events import EventWatcher
from orchestrator.outcome import RoomStatus
from orchestrator.prefill_room import PrefillRoom
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from protocols.planning import ChunkPlan
from tests.service.scenes import (
    LateModel,
    both_modes,
    config,
    expected_items,
    faulty,
    idle_turns,
    ints,
    once,
    outcomes,
    spec,
    written,
)
from tests.service.scripted import SOURCE, TARGET, RaiseOnce, differences, scene
from tests.support.waiting import until, within

# -- A10: errors while a chunk is set up -------------------------------------------------------------------------------

BAD_PAGES: dict[str, dict[str, Any]] = {
    "negative": {"pages": [3, -1, 9]},
    "beyond the pool": {"pages": [3, 64, 9]},
    "far beyond": {"pages": np.array([3, 2**63, 9], np.uint64)},
    "twice": {"pages": [3, 4, 3]},
    "fractions": {"pages": [3.0, 4.5, 9.0]},
    "two dimensions": {"pages": [[3, 4, 9]]},
    "ragged": {"pages": [[3], [4, 9]]},
    "words": {"pages": ["a", "b", "c"]},
    "objects": {"pages": [object(), None, 3]},
    "a number": {"pages": 3},
    "too few": {"pages": [3, 4], "end_token": 12},
    "too many": {"pages": [3, 4, 9], "end_token": 4},
    "an odd start": {"start_token": 2},
    "a negative start": {"start_token": -4},
    "ends within a page": {"end_token": 11, "last": False},
    "ends before it starts": {"start_token": 8, "end_token": 4, "pages": []},
    "positions outside": {"positions": [0, 1, 3], "end_token": 12},
    "positions too few": {"positions": [0, 1], "end_token": 12},
    "positions that are none": {"positions": "abc", "end_token": 12},
}


@pytest.mark.row("A10")
@pytest.mark.parametrize("wrong", BAD_PAGES.values(), ids=BAD_PAGES)
async def test_a_bad_chunk_fails_its_room_and_nobody_else(wrong: dict[str, Any]) -> None:
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        bad = cluster.decode().expect(2, 0, cluster.addresses, ints(1, 2, 3), total_tokens=12)
        fields: dict[str, Any] = {"room": 2, "pages": [3, 4, 9], "last": True}
        forward = cluster.forward([ChunkSpec(**fields | wrong), spec(1, SOURCE)])
        assert len(forward.refused) == 1
        assert cluster.prefill().poll(2) is RoomStatus.FAILED, "at once, for the scheduler to see"
        prefill, _ = await outcomes(cluster, bad)
        assert prefill.error is not None
        assert prefill.error.what
        assert str(prefill.error) in str(bad.result().error)
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert differences(cluster) == []
        assert cluster.balanced() == []


@pytest.mark.row("A10")
async def test_what_is_no_chunk_at_all_is_refused_too() -> None:
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        junk: list[Any] = [ChunkSpec(room=[], pages=[1]), ChunkSpec(room="a", pages=[1]), ChunkSpec(room=-1)]  # type: ignore[arg-type]
        forward = cluster.forward([*junk, None, spec(1, SOURCE)])  # type: ignore[list-item]
        assert len(forward.refused) == 4
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert cluster.balanced() == []


@pytest.mark.row("A10")
@pytest.mark.parametrize("form", ["list", "tuple", "range", "int32", "uint16", "tensor"])
@pytest.mark.parametrize("start", [None, 0])
async def test_any_form_of_indices_will_do_and_a_missing_start_is_zero(form: str, start: int | None) -> None:
    source = ints(3, 4, 5)
    pages: Any = {
        "list": [3, 4, 5],
        "tuple": (3, 4, 5),
        "range": range(3, 6),
        "int32": source.astype(np.int32),
        "uint16": source.astype(np.uint16),
    }.get(form)
    if form == "tensor":
        pages = pytest.importorskip("torch").tensor([3, 4, 5])
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([ChunkSpec(room=1, start_token=start, pages=pages, last=True)])
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert differences(cluster, source) == []


@pytest.mark.row("A10")
@pytest.mark.parametrize("nothing", [None, [], np.empty(0), np.empty(0, np.int64)])
async def test_no_indices_are_no_pages(nothing: Any) -> None:
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, nothing, total_tokens=0, aux_slot=3)
        cluster.forward([ChunkSpec(room=1, start_token=None, pages=nothing, last=True, aux_slot=5)])
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert prefill.bytes == 32


@contextlib.contextmanager
def injected(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *at: int) -> Any:
    with monkeypatch.context() as patch:
        fault = RaiseOnce(getattr(owner, name), *at)
        patch.setattr(owner, name, fault)
        yield fault
        assert fault.calls > max(at), "the fault was reached"


BEFORE_A_BYTE_LEFT: dict[str, tuple[Any, str, int]] = {
    "planning": (orchestrator.destination, "plan_chunk", 0),
    "the whole plan": (PrefillRoom, "check_chunk", 0),
    "the buffers of a layer": (PrefillRoom, "hooked_buffers", 0),
    "blocks of the first group": (ChunkPlan, "blocks", 0),
    "watching the first event": (EventWatcher, "watch", 0),
}


@pytest.mark.row("A10", "A1")
@pytest.mark.parametrize("owner, name, call", BEFORE_A_BYTE_LEFT.values(), ids=BEFORE_A_BYTE_LEFT)
@pytest.mark.parametrize("offer_first", [True, False])
async def test_an_error_before_a_byte_left_sends_the_chunk_after_its_forward(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, offer_first: bool
) -> None:
    async with scene() as cluster:
        expect = partial(cluster.decode().expect, 1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        handle = expect() if offer_first else None
        await idle_turns()
        with injected(monkeypatch, owner, name, call):
            forward = cluster.prefill().begin_forward([spec(1, SOURCE, aux_slot=5)])
            for layer in range(4):
                forward.layer_end(layer)
                await idle_turns(3)
            handle = handle or expect()
            await idle_turns()
            forward.end()
            prefill, decode = await outcomes(cluster, handle)
        assert prefill.ok, prefill.error
        assert decode.ok
        assert prefill.layers_fallback >= 3, "the chunk was degraded"
        assert differences(cluster) == []
        sent = written(faulty(cluster).log, cluster.decode_pools[0].layout)
        assert sent == once(expected_items(cluster.decode_pools[0].layout, TARGET, aux=[3]))


AFTER_A_BYTE_LEFT: dict[str, tuple[Any, str, int]] = {
    "the buffers of a layer": (PrefillRoom, "hooked_buffers", 1),
    "blocks of the second group": (ChunkPlan, "blocks", 1),
    "blocks of the fallback": (ChunkPlan, "blocks", 2),
    "the unfired buffers": (PrefillRoom, "buffers_without", 0),
    "aux": (orchestrator.prefill_room.PrefillRoom, "hand_over_aux", 0),
    "watching the end event": (EventWatcher, "watch", 2),
}


@pytest.mark.row("A10")
@pytest.mark.parametrize("owner, name, call", AFTER_A_BYTE_LEFT.values(), ids=AFTER_A_BYTE_LEFT)
async def test_an_error_after_a_byte_left_fails_the_room(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        with injected(monkeypatch, owner, name, call):
            cluster.forward([spec(1, SOURCE, aux_slot=5)])
            prefill, decode = await outcomes(cluster, handle)
        assert "injected" in str(prefill.error)
        assert "injected" in str(decode.error)
        await until(lambda: cluster.balanced() == [], "nothing is left")


@pytest.mark.row("A10", "A16")
async def test_an_error_that_stays_fails_the_room_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Degraded, the chunk plans anew; a planner that is broken for good fails it then."""
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        with injected(monkeypatch, orchestrator.destination, "plan_chunk", *range(9)) as fault:
            fault.calls = 0
            monkeypatch.setattr(fault, "at", range(10**6))
            cluster.forward([spec(1, SOURCE)])
            prefill, decode = await outcomes(cluster, handle)
            fault.calls = 10**6 + 1
        assert "injected" in str(prefill.error)
        assert "injected" in str(decode.error)
        assert faulty(cluster).attempts == 0
        await until(lambda: cluster.balanced() == [], "nothing is left")


REGISTRATION: dict[str, tuple[Any, str]] = {
    "checking the spec": (orchestrator.prefill, "validate"),
    "making the room": (orchestrator.sender, "PrefillRoom"),
    "making the chunk": (orchestrator.prefill_room, "Chunk"),
    "adding the chunk": (PrefillRoom, "register"),
    "attaching the pass": (Chunk, "attach"),
}


@pytest.mark.row("A10")
@pytest.mark.parametrize("owner, name", REGISTRATION.values(), ids=REGISTRATION)
async def test_an_error_in_a_step_of_registration_fails_that_room_alone(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    async with scene() as cluster:
        with injected(monkeypatch, owner, name, 0):
            cluster.forward([spec(2, ints(1, 2)), spec(1, SOURCE)])
            await until(lambda: cluster.prefill().poll(2).ended, "the room fails")
            await idle_turns()
        assert "injected" in str(cluster.prefill().result(2).error)
        assert cluster.prefill().source_free(2)
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        late = cluster.decode().expect(2, 0, cluster.addresses, ints(1, 2), total_tokens=8)
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert differences(cluster) == []
        assert "injected" in str((await within(late)).error)
        await until(lambda: cluster.balanced() == [], "nothing is left")


@pytest.mark.row("A10", "A4")
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
async def test_an_event_that_cannot_be_recorded(failing: tuple[int, ...]) -> None:
    """The first group's: nothing has left, the chunk goes after its forward. The second's: the room fails."""
    device = FakeDevice()
    async with scene(events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        for group in range(2):
            device.fail_record = RuntimeError("no event") if group in failing else None
            forward.layer_end(2 * group)
            forward.layer_end(2 * group + 1)
            if failing == (1,) and group == 0:
                await until(lambda: faulty(cluster).attempts or cluster.prefill().poll(1).ended)
        device.fail_record = None
        forward.end()
        prefill, _ = await outcomes(cluster, handle)
        if failing == (1,):
            assert "no event" in str(prefill.error)
        else:
            assert prefill.ok
            assert differences(cluster) == []
        await until(lambda: cluster.balanced() == [], "nothing is left")


@pytest.mark.row("A10")
@both_modes
async def test_without_an_end_event_nothing_can_be_read(layerwise: bool) -> None:
    device = FakeDevice()
    async with scene(events=device, config=config(layerwise=layerwise)) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        device.fail_record = RuntimeError("no event")
        cluster.forward([spec(1, SOURCE)])
        prefill, _ = await outcomes(cluster, handle)
        assert "no event" in str(prefill.error)
        assert faulty(cluster).attempts == 0


@pytest.mark.row("A10", "A4")
@pytest.mark.parametrize("broken", [0, 2])
async def test_an_event_that_cannot_be_asked(broken: int) -> None:
    """The first group's event: the chunk is degraded. The end event: nobody knows when the layers are written."""

    class Device(FakeDevice):
        def reached(self, stream: Hashable, position: int) -> bool:
            if position == broken_position:
                raise RuntimeError("sticky error")
            return super().reached(stream, position)

    device, src = Device(), Pool(seed=1)
    broken_position = {0: 2, 2: 5}[broken]
    async with scene(prefills=[src], events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        LateModel(src, device).forward(cluster.prefill().begin_forward([spec(1, SOURCE)]), SOURCE, 4)
        device.run()
        prefill, _ = await outcomes(cluster, handle)
        if broken:
            assert "sticky error" in str(prefill.error)
        else:
            assert prefill.ok
            assert differences(cluster) == []
