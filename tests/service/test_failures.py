"""What goes wrong on the prefill side: the room fails with its first cause, or the chunk goes after its forward and
arrives all the same. The forward thread never sees an exception, and no page is free while a batch may read it."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Hashable
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
from orchestrator.destination import Destination
from orchestrator.engines.base import EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, nth
from orchestrator.forward import ForwardPass
from orchestrator.outcome import RoomStatus
from orchestrator.prefill_room import PrefillRoom
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from protocols.blocks import Ints
from protocols.errors import DeadlineError
from protocols.ids import RoomKey
from protocols.planning import ChunkPlan
from tests.service.scenes import (
    LateModel,
    asked_again,
    both_modes,
    config,
    expected_items,
    faulty,
    idle_turns,
    ints,
    live,
    once,
    outcomes,
    quarantined,
    sender,
    spec,
    taken,
    wrapped,
    written,
)
from tests.support.waiting import until, within

SOURCE, TARGET = ints(3, 4, 9), ints(20, 7, 8)


def scene(**changes: Any) -> Cluster:
    """One prefill whose engine follows a script, one decode."""
    fields: dict[str, Any] = {"prefills": [Pool(seed=1)], "decodes": [Pool()], "config": config(), "wrap": wrapped()}
    return Cluster(**fields | changes)


def differences(cluster: Cluster, source: Ints = SOURCE, target: Ints = TARGET) -> list[str]:
    return cluster.prefill_pools[0].differences(cluster.decode_pools[0], source, target)


class RaiseOnce:
    """In place of a function: raises at these calls (from 0), else calls it."""

    def __init__(self, real: Callable[..., Any], *at: int, error: type[Exception] = RuntimeError) -> None:
        self.real, self.at, self.error = real, at, error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise self.error("injected")
        return self.real(*args, **kwargs)

    def __get__(self, owner: object, _: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)


# -- A8: errors of the engine ------------------------------------------------------------------------------------------


@pytest.mark.row("A8", "B4")
@pytest.mark.parametrize("how", ["every block", "one block", "refused"])
@pytest.mark.parametrize("k", range(6))
async def test_an_engine_error_in_any_layer_fails_the_room_with_the_first_cause(k: int, how: str) -> None:
    """Four layers one by one, the draft layer, aux: six submissions, each of them in its turn the one that fails."""
    async with scene(config=config(layer_group=1)) as cluster:
        engine = faulty(cluster)
        engine.add(Fault(nth(k), fail=EVERY if how == "every block" else {0} if how == "one block" else ()))
        engine.faults[0].refuse = how == "refused"
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        cluster.forward([spec(1, SOURCE, aux_slot=5)])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (False, False)
        cause = "refused by the script" if how == "refused" else "failed by the script"
        assert cause in str(prefill.error)
        assert cause in str(decode.error), "the decode hears the first cause"
        assert cluster.prefill().poll(1) is RoomStatus.FAILED
        if how == "refused":
            await until(lambda: taken(cluster) == 0, "what was never submitted is quiet")
        else:
            await until(lambda: quarantined(cluster), "what failed is in doubt")
            if k == 5:
                assert quarantined(cluster) == 1, "only the aux slot"
        assert not handle.units_free() or how == "refused"


@pytest.mark.row("A8", "A16")
@pytest.mark.parametrize("k", range(2))
async def test_the_same_without_layerwise(k: int) -> None:
    async with scene(config=config(layerwise=False)) as cluster:
        faulty(cluster).add(Fault(nth(k), fail=EVERY))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        cluster.forward([spec(1, SOURCE, aux_slot=5)])
        prefill, decode = await outcomes(cluster, handle)
        assert "failed by the script" in str(prefill.error)
        assert "failed by the script" in str(decode.error)


@pytest.mark.row("A8")
async def test_a_second_error_does_not_change_the_cause() -> None:
    async with scene(config=config(layer_group=1)) as cluster:
        engine = faulty(cluster)
        first = engine.add(Fault(nth(0), hold=True, fail=EVERY))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(1, SOURCE)])
        await until(lambda: engine.attempts)
        cluster.prefill().abort(1, reason="first")
        cluster.prefill().abort(1, reason="second")
        handle.abort("third")
        first.release()
        prefill, decode = await outcomes(cluster, handle)
        assert "first" in str(prefill.error)
        assert "third" in str(decode.error), "each side keeps the cause that came first there"


@pytest.mark.row("A8")
async def test_a_timeout_names_where_every_layer_stands() -> None:
    """Layers fired, queued, posted, landed, failed; room, chunk and peer."""
    device, src = FakeDevice(), Pool(seed=1)
    limits = EngineLimits(max_batch_blocks=10, window_blocks=10)
    settings = config(layer_group=1, room_timeout_s=0.3)
    async with scene(prefills=[src], config=settings, decode_config=config(), events=device, limits=limits) as cluster:
        engine = faulty(cluster)
        hold = engine.add(Fault(nth(1, 2, 3), hold=True))
        handle = cluster.decode().expect(77, 3, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(77, SOURCE, gen=3)])
        LateModel(src, device).forward(forward, SOURCE, 4)
        device.step(3)  # layer 3, the draft layer and the end stand still
        room = await live(cluster, 77, 3)
        await until(lambda: room.destinations)
        peer = next(iter(room.destinations)).hex()[:8]
        await until(lambda: cluster.prefill().poll(77, 3).ended)
        error = cluster.prefill().result(77, 3).error
        assert isinstance(error, DeadlineError)
        text = str(error)
        for fact in ("fired 3", "queued 3", "posted 3", "landed 1", "failed 0", "77.3", "77.3@0", peer):
            assert fact in text, text
        hold.release()
        _, decode = await outcomes(cluster, handle)
        assert "landed 1" in str(decode.error)


@pytest.mark.row("A8")
async def test_a_timeout_without_an_offer_says_so() -> None:
    async with scene(config=config(room_timeout_s=0.05)) as cluster:
        cluster.forward([spec(5, SOURCE)])
        result = await within(cluster.prefill().finished(5))
        assert isinstance(result.error, DeadlineError)
        assert "offers=0 of unknown" in str(result.error)
        await until(lambda: cluster.prefill().source_free(5))
        assert cluster.balanced() == []


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


# -- A12: passes that are formed again, thrown away, or never end ------------------------------------------------------


@pytest.mark.row("A12", "A15")
@pytest.mark.parametrize("fate", ["forgotten", "discarded", "ended"])
async def test_a_batch_formed_nine_times_overlaps_in_the_last(monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    """Only the ninth pass runs. Before, a pass was dropped, discarded, or (wrongly) never run."""
    validate = RaiseOnce(orchestrator.chunk.validate)
    monkeypatch.setattr(orchestrator.prefill, "validate", validate)
    compare = RaiseOnce(np.array_equal)
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        chunk = spec(1, SOURCE)
        passes: list[ForwardPass] = []
        for number in range(9):
            passes.append(cluster.prefill().begin_forward([chunk]))
            if fate == "discarded" and number < 8:
                passes[-1].discard()
            await idle_turns(number % 3)
        room = await live(cluster, 1)
        monkeypatch.setattr(np, "array_equal", compare)
        passes.append(cluster.prefill().begin_forward([chunk]))
        await until(lambda: room.chunks[0].forward is passes[-1], "the chunk is with the newest pass")
        monkeypatch.setattr(np, "array_equal", compare.real)
        if fate == "ended":  # a pass that lost its chunk ends: nothing of it is the chunk's end
            for forward in passes[:-1]:
                forward.end()
            await idle_turns()
        with passes[-1] as forward:
            for layer in range(4):
                forward.layer_end(layer)
        prefill, _ = await outcomes(cluster, handle)
        assert (prefill.ok, prefill.chunks) == (True, 1)
        assert (prefill.layers_fired, prefill.layers_fallback) == (4, 1), "every hooked layer overlapped"
        assert differences(cluster) == []
        assert validate.calls == 1, "the other eight cost a dictionary lookup"
        assert compare.calls == 0, "on the loop as well"


@pytest.mark.row("A12", "A9")
async def test_an_equal_chunk_is_the_same_chunk() -> None:
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        twice = cluster.prefill().begin_forward([spec(1, SOURCE), spec(1, SOURCE.copy()), spec(1, SOURCE)])
        again = cluster.forward([spec(1, [3, 4, 9])])  # type: ignore[arg-type]
        twice.discard()
        assert (twice.refused, again.refused) == ([], [])
        prefill, _ = await outcomes(cluster, handle)
        assert (prefill.ok, prefill.chunks, prefill.layers_fired) == (True, 1, 4)
        assert written(faulty(cluster).log, cluster.decode_pools[0].layout).total() == 30


@pytest.mark.row("A12", "A10")
@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("device_runs", [True, False])
async def test_a_forward_that_raises_at_any_layer(k: int, device_runs: bool) -> None:
    """Before a group closed the chunk moves to the next run; afterwards its pages are rewritten under us: it fails."""
    device, src = FakeDevice(), Pool()
    async with scene(prefills=[src], events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        await until(lambda: len(sender(cluster).rooms), "the offer is here")
        model, chunk = LateModel(src, device), spec(1, SOURCE)
        with pytest.raises(ZeroDivisionError), cluster.prefill().begin_forward([chunk]) as forward:
            for layer in range(k):
                model.layer(layer, SOURCE)
                forward.layer_end(layer)
            await asked_again(cluster) if k >= 2 else await idle_turns()
            if device_runs:
                device.run()
                await until(lambda: faulty(cluster).pending == 0)
            raise ZeroDivisionError("out of memory")
        await idle_turns()
        again = cluster.prefill().begin_forward([chunk])
        model.forward(again, SOURCE, 4)
        device.run()
        prefill, decode = await outcomes(cluster, handle)
        if k < 2:
            assert (prefill.ok, prefill.layers_fired) == (True, 4)
            assert differences(cluster) == []
        else:
            assert (prefill.ok, decode.ok) == (False, False)
            assert "ZeroDivisionError: out of memory" in str(prefill.error)
            assert again.refused


@pytest.mark.row("A12", "A6", "A4")
@pytest.mark.parametrize("discard", [True, False])
async def test_a_layer_that_waits_for_its_event_has_fired(discard: bool) -> None:
    """The chunk's coroutine has taken the group and awaits its event: neither a discard nor a newer pass may pretend
    that nothing has fired, else layers of the first run go out while the second rewrites them."""
    device, src = FakeDevice(), Pool()
    async with scene(prefills=[src], events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        await until(lambda: len(sender(cluster).rooms), "the offer is here")
        model, chunk = LateModel(src, device), spec(1, SOURCE)
        first = cluster.prefill().begin_forward([chunk])
        for layer in range(2):
            model.layer(layer, SOURCE)
            first.layer_end(layer)
        await asked_again(cluster)
        if discard:
            first.discard("retracted")
        second = cluster.prefill().begin_forward([chunk])
        await idle_turns()
        if discard:
            prefill, _ = await outcomes(cluster, handle)
            assert "retracted" in str(prefill.error)
            assert faulty(cluster).attempts == 0
        else:
            room = await live(cluster, 1)
            assert room.chunks[0].forward is first
            second.discard()
            model.layer(2, SOURCE)
            model.layer(3, SOURCE)
            model.layer(4, SOURCE)
            first.end()
            device.run()
            prefill, _ = await outcomes(cluster, handle)
            assert (prefill.ok, prefill.layers_fired) == (True, 2)
            assert differences(cluster) == []


@pytest.mark.row("A12")
@pytest.mark.parametrize("fired", [0, 2, 4])
async def test_a_pass_that_never_ends_fails_its_chunks_by_its_deadline(fired: int) -> None:
    async with scene(config=config(pass_timeout_s=0.05)) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        for layer in range(fired):
            forward.layer_end(layer)
        prefill, decode = await outcomes(cluster, handle)
        assert isinstance(prefill.error, DeadlineError)
        assert "1.0@0" in str(prefill.error)
        assert "did not end in time" in str(decode.error)
        forward.layer_end(3)
        forward.end()
        await until(lambda: cluster.balanced() == [], "nothing is left")


@pytest.mark.row("A12")
async def test_a_chunk_given_back_and_never_taken_again_fails_by_the_deadline() -> None:
    async with scene(config=config(pass_timeout_s=0.05)) as cluster:
        cluster.prefill().begin_forward([spec(1, SOURCE)]).discard()
        result = await within(cluster.prefill().finished(1))
        assert isinstance(result.error, DeadlineError)


@pytest.mark.row("A12")
async def test_the_deadline_counts_from_the_pass_that_holds_the_chunk() -> None:
    """Formed again shortly before the deadline of the first pass: the second has its own time."""
    async with scene(config=config(pass_timeout_s=0.2)) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        chunk = spec(1, SOURCE)
        begun = sender(cluster).clock.now()
        cluster.prefill().begin_forward([chunk])
        await until(lambda: sender(cluster).clock.now() >= begun + 0.15)
        forward = cluster.prefill().begin_forward([chunk])
        await until(lambda: sender(cluster).clock.now() >= begun + 0.25)
        assert not cluster.prefill().poll(1).ended
        forward.end()
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok


@pytest.mark.row("A12", "A9")
async def test_a_later_chunk_does_not_extend_the_deadline_of_a_stuck_pass() -> None:
    async with scene(config=config(pass_timeout_s=0.2)) as cluster:
        cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        begun = sender(cluster).clock.now()
        cluster.prefill().begin_forward([spec(1, ints(3), last=False)])  # never ends
        await until(lambda: sender(cluster).clock.now() >= begun + 0.15)
        cluster.forward([spec(1, ints(4), start_token=4, last=False)])
        await until(lambda: cluster.prefill().poll(1).ended)
        assert sender(cluster).clock.now() < begun + 0.3


@pytest.mark.row("A12", "A16")
@both_modes
@pytest.mark.parametrize("fired", [1, 2, 3])
async def test_a_batch_formed_while_the_pass_runs_does_not_take_its_chunk(layerwise: bool, fired: int) -> None:
    """A hook has run, even if no group has closed: the chunk stays where its layers are. The other batch is thrown
    away, and the chunk neither waits for it nor loses what fired."""
    async with scene(config=config(layerwise=layerwise)) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        chunk = spec(1, SOURCE)
        forward = cluster.prefill().begin_forward([chunk])
        for layer in range(4):
            forward.layer_end(layer)
            if layer == fired - 1:
                other = cluster.prefill().begin_forward([chunk])
                await idle_turns()
        forward.end()
        other.discard()
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert prefill.layers_fired == (4 if layerwise else 0)
        assert differences(cluster) == []


# -- B2: refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.row("B2")
@both_modes
async def test_empty_layers_are_skipped(layerwise: bool) -> None:
    """All pages of the chunk are in the decode's prefix: nothing is submitted for it, not even an empty batch."""
    async with scene(config=config(layerwise=layerwise)) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, ints(20), prefix_tokens=8, total_tokens=12)
        cluster.forward([spec(1, ints(3, 4), last=False)])
        room = await live(cluster, 1)
        await until(lambda: room.concluded_chunks == 1, "the chunk concludes")
        assert faulty(cluster).attempts == 0
        assert room.spans == []
        cluster.forward([spec(1, ints(9), start_token=8)])
        prefill, decode = await outcomes(cluster, handle)
        assert prefill.bytes == decode.bytes == 10 * 64
        assert differences(cluster, ints(9), ints(20)) == []


@pytest.mark.row("B2", "B4")
@pytest.mark.parametrize("how", ["refused", "failed"])
@pytest.mark.parametrize("where", ["same hand-over", "other destination"])
async def test_after_a_refusal_what_was_sent_drains_and_nothing_follows(how: str, where: str) -> None:
    """One block a batch: the first is held in flight, the second is refused (or fails); three groups, the fallback and
    a second destination still have theirs to send, and must not."""
    limits = EngineLimits(max_batch_blocks=1, window_blocks=4)
    decodes = [Pool(), Pool()] if where == "other destination" else [Pool()]
    async with scene(config=config(layer_group=1), limits=limits, decodes=decodes) as cluster:
        engine = faulty(cluster)
        hold = engine.add(Fault(nth(0), hold=True))
        engine.add(Fault(nth(1), refuse=how == "refused", fail=EVERY if how == "failed" else ()))
        handles = [
            decode.expect(1, 0, cluster.addresses, ints(7), total_tokens=4, destinations=len(decodes))
            for decode in cluster.decodes
        ]
        room = await live(cluster, 1)
        await until(lambda: len(room.destinations) == len(decodes))
        forward = cluster.prefill().begin_forward([spec(1, ints(3))])
        forward.layer_end(0)
        await until(lambda: cluster.prefill().poll(1).ended, "the room fails at once")
        attempts = engine.attempts
        for layer in range(1, 4):
            forward.layer_end(layer)
        forward.end()
        await idle_turns()
        assert engine.attempts == attempts
        assert engine.pending == 1
        assert not cluster.prefill().source_free(1), "what was sent before still drains"
        hold.release()
        prefill, _ = await outcomes(cluster, handles[0])
        assert "by the script" in str(prefill.error)
        assert engine.attempts == attempts
        if how == "refused":
            assert attempts == 2, "nothing is submitted after it, not to the other destination either"


@pytest.mark.row("C3", "A9", "B2")
@pytest.mark.parametrize("how", ["abort", "refusal"])
async def test_a_room_that_only_queues_tells_its_peer_why_it_ends(how: str) -> None:
    """Stopping finishes its last hand-over at once: the peer must hear the reason all the same, and hear it first."""
    limits = EngineLimits(max_batch_blocks=1, window_blocks=1)
    async with scene(limits=limits) as cluster:
        engine = faulty(cluster)
        hold = engine.add(Fault(nth(0), hold=True))
        engine.add(Fault(nth(1), refuse=True))
        first = cluster.decode().expect(1, 0, cluster.addresses, ints(7), total_tokens=4)
        cluster.forward([spec(1, ints(3))])
        await until(lambda: engine.attempts)
        second = cluster.decode().expect(2, 0, cluster.addresses, ints(8), total_tokens=4)
        cluster.forward([spec(2, ints(4), last=False)])
        room = await live(cluster, 2)
        await until(lambda: room.outstanding, "it queues behind the first")
        if how == "abort":
            cluster.prefill().abort(2, reason="a word of the prefill")
        else:
            cluster.prefill().abort(1)
            hold.release()
        prefill, decode = await outcomes(cluster, second)
        cause = "a word of the prefill" if how == "abort" else "refused by the script"
        assert cause in str(prefill.error)
        assert cause in str(decode.error)
        await until(second.units_free)
        hold.release()
        await outcomes(cluster, first)


# -- V2, V5, C5: what is in flight -------------------------------------------------------------------------------------


@pytest.mark.row("C5", "C2", "B4")
@both_modes
@pytest.mark.parametrize("end", ["abort", "decode abort", "deadline", "failed write", "shutdown"])
async def test_source_pages_are_not_free_while_a_batch_may_read_them(layerwise: bool, end: str) -> None:
    """However the room ends: FAILED at once, and free only when the held batch is terminal."""
    settings = config(layerwise=layerwise, layer_group=1, room_timeout_s=0.1 if end == "deadline" else 10)
    limits = EngineLimits(max_batch_blocks=1, window_blocks=4)
    async with scene(config=settings, limits=limits) as cluster:
        engine, freed = faulty(cluster), list[bool]()
        engine.add(Fault(nth(0), hold=True))
        engine.add(Fault(nth(1), fail=EVERY, hold=end != "failed write"))
        handle = cluster.decode().expect(1, 0, cluster.addresses, ints(7), total_tokens=4)
        cluster.forward([spec(1, ints(3))])
        await until(lambda: engine.attempts >= 2)
        room = await live(cluster, 1)
        lane = next(iter(room.destinations.values())).lane
        assert lane is not None
        cluster.prefill().on_source_free(1, 0, lambda: freed.append(engine.pending == 0))
        match end:
            case "abort":
                assert cluster.prefill().abort(1)
                assert cluster.prefill().poll(1) is RoomStatus.FAILED
            case "decode abort":
                handle.abort()
            case "shutdown":
                for room in sender(cluster).rooms:
                    room.fail(DeadlineError("as a shutdown does"))
        await until(lambda: cluster.prefill().poll(1) is RoomStatus.FAILED)
        in_flight = lane.statistics().window.blocks
        assert in_flight >= 1
        await until(lambda: handle.poll().ended)
        await asked_again(cluster, 20)
        assert (cluster.prefill().source_free(1), freed) == (False, [])
        assert not handle.units_free()
        assert lane.statistics().window.blocks == engine.pending >= 1, "permits come back by completion"
        assert taken(cluster) == 1
        for fault in engine.faults:
            fault.release()
        await until(lambda: freed == [True], "free with the completion")
        assert cluster.prefill().source_free(1)
        assert lane.idle
        cluster.prefill().on_source_free(1, 0, lambda: freed.append(True))
        assert freed == [True, True], "at once when it is free already"


@pytest.mark.row("C5")
async def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the other callbacks of its room, nor the room that waits for the permits of the same lane."""
    limits = EngineLimits(max_batch_blocks=1, window_blocks=1)
    async with scene(limits=limits) as cluster:
        engine, freed = faulty(cluster), list[int]()
        hold = engine.add(Fault(nth(0), hold=True))
        first = cluster.decode().expect(1, 0, cluster.addresses, ints(7), total_tokens=4)
        second = cluster.decode().expect(2, 0, cluster.addresses, ints(8), total_tokens=4)
        cluster.forward([spec(1, ints(3))])
        await until(lambda: engine.attempts)
        cluster.forward([spec(2, ints(4))])
        await idle_turns()

        def broken() -> None:
            raise RuntimeError("the embedder's bug")

        cluster.prefill().on_source_free(1, 0, broken)
        cluster.prefill().on_source_free(1, 0, lambda: freed.append(1))
        first.on_units_free(broken)
        cluster.prefill().abort(1)
        await idle_turns()
        hold.release()
        await outcomes(cluster, second)
        await outcomes(cluster, first)
        assert second.result().ok
        assert freed == [1]
        assert "the embedder's bug" in caplog.text
        await until(lambda: cluster.balanced() == [], "nothing is left")
        caplog.clear()


@pytest.mark.row("C5", "C6")
async def test_a_stale_generation_fails_and_holds_nothing() -> None:
    """A chunk of an older generation than the live one, a late abort of one: ended at once, and its pages are free."""
    async with scene() as cluster:
        cluster.forward([spec(1, ints(3), gen=5)])
        await live(cluster, 1, 5)
        cluster.forward([spec(1, ints(4), gen=4)])
        await until(lambda: cluster.prefill().poll(1, 4).ended, "the stale one fails")
        await until(lambda: cluster.prefill().source_free(1, 4), "and holds no page")
        cluster.prefill().abort(1, 3)
        await until(lambda: cluster.prefill().source_free(1, 3), "an abort of a stale one as well")
        assert not cluster.prefill().poll(1, 5).ended
        cluster.forward([spec(1, ints(4), gen=6)])
        await until(lambda: cluster.prefill().poll(1, 5).ended, "a newer one ends it")
        assert cluster.prefill().source_free(1, 5)
        assert "newer" in str(cluster.prefill().result(1, 5).error)
        rooms = sender(cluster).rooms
        assert rooms.remembered == 3, "each ended one is remembered, and forgotten in its time"
        assert rooms.verdict(RoomKey(1, 4)) is not None


@pytest.mark.row("A8", "C5")
@pytest.mark.parametrize("how", ["refused", "failed", "mismatch", "abort", "set-up", "success"])
async def test_an_ended_room_is_not_kept_alive_by_its_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V8: the verdict is remembered for ten minutes, one in doubt for longer; the room, its plans and its page lists
    are not. An exception keeps the frames it was raised through, and they keep everything."""
    if how == "set-up":
        monkeypatch.setattr(Destination, "plan", RaiseOnce(Destination.plan, *range(9)))
    async with scene() as cluster:
        faulty(cluster).add(Fault(refuse=how == "refused", fail=EVERY if how == "failed" else ()))
        tokens = 16 if how == "mismatch" else 12
        target = ints(20, 7, 8, 9) if how == "mismatch" else TARGET
        handle = cluster.decode().expect(1, 0, cluster.addresses, target, total_tokens=tokens)
        room = weakref.ref(await live(cluster, 1))
        if how == "abort":
            cluster.prefill().begin_forward([spec(1, SOURCE)])
            await idle_turns()
            cluster.prefill().abort(1)
        else:
            cluster.forward([spec(1, SOURCE)])
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok == (how == "success")
        cause: BaseException | None = prefill.error
        while cause is not None:
            assert cause.__traceback__ is None
            cause = cause.__cause__ or cause.__context__
        await idle_turns()
        gc.collect()
        assert room() is None


# -- V6: after the loop has ended --------------------------------------------------------------------------------------


@pytest.mark.row("A10", "C6")
@pytest.mark.parametrize("when", ["before begin", "before the hooks", "before the end"])
async def test_hooks_after_the_loop_has_ended_are_harmless(when: str) -> None:
    device = FakeDevice()
    cluster = scene(events=device)
    forward: ForwardPass | None = None
    async with cluster:
        prefill = cluster.prefill()
        if when != "before begin":
            forward = prefill.begin_forward([spec(1, SOURCE)])
        if when == "before the end":
            for layer in range(4):
                forward.layer_end(layer) if forward else None
    if forward is None:
        forward = prefill.begin_forward([spec(1, SOURCE)])
    for layer in range(4):
        forward.layer_end(layer)
    forward.end()
    assert prefill.poll(1) is RoomStatus.FAILED, "a room that nobody will ever serve has failed"
    assert prefill.result(1).error is not None
    assert prefill.source_free(1)
    assert prefill.abort(1) is False
    prefill.abort(2)
    assert prefill.source_free(2)
    assert not (await within(prefill.finished(1))).ok


@pytest.mark.row("A10", "C6")
async def test_what_is_registered_while_the_node_stops_ends_too() -> None:
    """Between the last room of `stop` and the closing of the inbox: accepted means processed, and processed means
    that the room ends."""
    async with scene() as cluster:
        receiver = cluster.decode_nodes[0].receiver
        assert receiver is not None
        await receiver.stop()
        late = cluster.decode().expect(2, 0, cluster.addresses, ints(8), total_tokens=4)
        await cluster.decode_nodes[0].stop()
        assert late.poll() is RoomStatus.FAILED
        assert late.units_free()
        await sender(cluster).stop()
        cluster.prefill().begin_forward([spec(2, ints(4)), ChunkSpec(room=3, fake=True, last=True)])
        await cluster.prefill_nodes[0].stop()
        for room in (2, 3):
            assert cluster.prefill().poll(room).ended
            assert cluster.prefill().source_free(room)


# -- rooms that ask for no transfer ------------------------------------------------------------------------------------


@pytest.mark.row("D1", "A10")
@pytest.mark.parametrize("offer", ["before", "amid", "after"])
async def test_a_fake_room_that_was_offered_pages_fails_and_holds_up_nobody(
    offer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The sides contradict each other. The decode must not wait for its deadline, and the pass has other chunks."""
    caplog.set_level(logging.ERROR)
    async with scene() as cluster:
        expect = partial(cluster.decode().expect, 2, 0, cluster.addresses, ints(30), total_tokens=4)
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        fake = expect() if offer == "before" else None
        if fake:
            await live(cluster, 2)
        forward = cluster.prefill().begin_forward([ChunkSpec(room=2, last=True, fake=True), spec(1, SOURCE)])
        if offer == "amid":
            await live(cluster, 2)
            fake = expect()
            rooms, key = sender(cluster).rooms, RoomKey(2, 0)
            await until(lambda: (room := rooms.live(key)) is None or room.destinations, "the offer has arrived")
        forward.end()
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        fake = fake or expect()
        assert not (await within(fake)).ok
        await until(lambda: cluster.prefill().poll(2).ended)
        await until(lambda: cluster.balanced() == [], "nothing is left")
        assert caplog.records == []
