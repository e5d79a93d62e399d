"""Forward passes that are formed again, thrown away, or never end (A12)."""

from __future__ import annotations

import numpy as np
import pytest

import orchestrator.chunk
import orchestrator.destination
import orchestrator.prefill
import orchestrator.prefill_room
import orchestrator.sender
from orchestrator.forward import ForwardPass
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from protocols.errors import DeadlineError
from tests.service.scenes import (
    LateModel,
    asked_again,
    both_modes,
    config,
    faulty,
    idle_turns,
    ints,
    live,
    outcomes,
    sender,
    spec,
    written,
)
from tests.service.scripted import SOURCE, TARGET, RaiseOnce, differences, scene
from tests.support.waiting import until, within

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
