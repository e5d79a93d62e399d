"""Layers leave while the forward runs: when a layer may be read, what goes with which event, what belongs to whom."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cuda_events import HostEvents
from orchestrator.decode import RoomHandle
from orchestrator.engines.faulty import Fault
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.forward import LayerNotifier
from orchestrator.loop_thread import EmbeddedLoop
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import POISON, Pool
from protocols.blocks import Ints
from protocols.errors import KvferryError
from protocols.grouping import closing_layers, fixed_groups
from tests.service.scenes import (
    PATIENCE_S,
    LateModel,
    asked_again,
    both_kinds,
    both_modes,
    config,
    expected_items,
    faulty,
    idle_turns,
    ints,
    live,
    once,
    outcomes,
    spec,
    wrapped,
    written,
)
from tests.support.waiting import until

Kind = Literal["mha", "mla"]
SOURCE, TARGET = ints(3, 4, 9), ints(20, 7, 8)


def layer_bytes(pool: Pool, layer: int) -> list[np.ndarray[Any, Any]]:
    return [array for (name, at), array in pool.arrays.items() if at == layer and name not in ("aux", "scratch")]


def arrived(src: Pool, dst: Pool, layer: int) -> bool:
    pairs = zip(layer_bytes(src, layer), layer_bytes(dst, layer), strict=True)
    return all(np.array_equal(a[SOURCE], b[TARGET]) for a, b in pairs)


def is_poison(dst: Pool, layer: int) -> bool:
    return all(bool((array == POISON).all()) for array in layer_bytes(dst, layer))


# -- A4: never before the event --------------------------------------------------------------------------------------


@pytest.mark.row("A4", "A15")
@both_kinds
async def test_an_event_held_back_holds_back_exactly_its_group(kind: Kind) -> None:
    device, src, dst = FakeDevice(), Pool(kind=kind), Pool(kind=kind)
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=device, wrap=wrapped()) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        LateModel(src, device).forward(forward, SOURCE, 4)
        await asked_again(cluster)
        assert faulty(cluster).attempts == 0, "nothing is written yet"

        device.step(2)
        await until(lambda: arrived(src, dst, 0) and arrived(src, dst, 1), "the first group arrives")
        device.step(1)  # layer 2 is written, layer 3 of the same group is not
        await asked_again(cluster)
        assert all(is_poison(dst, layer) for layer in (2, 3, 4))

        device.step(1)
        await until(lambda: arrived(src, dst, 2) and arrived(src, dst, 3), "the second group arrives")
        await asked_again(cluster)
        assert is_poison(dst, 4), "the draft layer waits for the end event"

        device.step(1)
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (True, True)
        assert src.differences(dst, SOURCE, TARGET) == []
        assert dst.untouched(TARGET)


@pytest.mark.row("A4", "A16")
async def test_without_layerwise_nothing_leaves_before_the_end_event() -> None:
    device, src, dst = FakeDevice(), Pool(), Pool()
    settings = config(layerwise=False)
    async with Cluster(prefills=[src], decodes=[dst], config=settings, events=device, wrap=wrapped()) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        LateModel(src, device).forward(forward, SOURCE, 4)
        device.step(4)
        await asked_again(cluster)
        assert faulty(cluster).attempts == 0
        assert device.recorded == 1, "one event behind everything"
        device.step(1)
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert src.differences(dst, SOURCE, TARGET) == []


@pytest.mark.row("A4")
async def test_the_oracle_sees_a_premature_read() -> None:
    """The control: with events that are true at once, the same scene delivers what was there before the kernels."""
    device, src, dst = FakeDevice(), Pool(), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=HostEvents()) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        LateModel(src, device).forward(forward, SOURCE, 4)
        await outcomes(cluster, handle)
        device.run()
        assert len(src.differences(dst, SOURCE, TARGET)) == 10 * len(SOURCE)


@pytest.mark.row("A4")
async def test_the_event_belongs_to_the_stream_that_wrote() -> None:
    """Two forwards on two streams: one that stands still does not hold back the other, nor lend it its progress."""
    device, src, dst = FakeDevice(), Pool(), Pool()
    pages = {1: (ints(1, 2), ints(11, 12)), 2: (ints(5, 6), ints(21, 22))}
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=device, wrap=wrapped()) as cluster:
        handles = {
            room: cluster.decode().expect(room, 0, cluster.addresses, target, total_tokens=8)
            for room, (_, target) in pages.items()
        }
        model = LateModel(src, device)
        for room, (source, _) in pages.items():
            forward = cluster.prefill().begin_forward([spec(room, source)])
            model.forward(forward, source, 4, stream=f"stream {room}")
        await asked_again(cluster)
        assert faulty(cluster).attempts == 0
        device.step(5, "stream 2")
        await outcomes(cluster, handles[2])
        assert src.differences(dst, *pages[2]) == []
        assert not handles[1].poll().ended
        assert dst.untouched(pages[2][1]), "of the other room nothing has left"
        device.step(5, "stream 1")
        await outcomes(cluster, handles[1])
        assert src.differences(dst, *pages[1]) == []


@pytest.mark.row("A4", "A16")
@both_modes
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_the_device_does_no_byte_is_stale(layerwise: bool, seed: int) -> None:
    """Rooms and forwards at random, the device in steps of any size, offers before and after the forward."""
    rng = random.Random(seed)
    device, src, dst = FakeDevice(), Pool(layers=5), Pool(layers=5)
    settings = config(layerwise=layerwise, layer_group=rng.choice([1, 2, 3, 8]))
    async with Cluster(prefills=[src], decodes=[dst], config=settings, events=device) as cluster:
        model = LateModel(src, device, seed)
        free_src, free_dst = rng.sample(range(64), 64), rng.sample(range(64), 64)
        rooms: list[tuple[int, Ints, Ints]] = []
        handles: list[RoomHandle] = []
        for number in range(6):
            fresh: list[tuple[int, Ints, Ints]] = []
            for _ in range(rng.choice([1, 2])):
                size = rng.choice([1, 2, 4])
                source, target = (ints(*(free.pop() for _ in range(size))) for free in (free_src, free_dst))
                fresh.append((len(rooms) + len(fresh), source, target))
            offers = [partial(offer, cluster, *room) for room in fresh]
            early = rng.randrange(len(offers) + 1)
            handles += [make() for make in offers[:early]]
            await idle_turns(rng.randrange(4))
            forward = cluster.prefill().begin_forward([spec(room, source) for room, source, _ in fresh])
            model.forward(forward, np.concatenate([source for _, source, _ in fresh]), 5, f"stream {number % 2}")
            handles += [make() for make in offers[early:]]
            rooms += fresh
            await idle_turns(rng.randrange(8))
            device.step(rng.randrange(7), "stream 0")
            device.step(rng.randrange(7), "stream 1")
        while device.step(rng.randrange(1, 4), "stream 0") or device.step(rng.randrange(1, 4), "stream 1"):
            await idle_turns(rng.randrange(6))
        for handle in handles:
            prefill, _ = await outcomes(cluster, handle)
            assert prefill.ok
        assert [src.differences(dst, source, target) for _, source, target in rooms] == [[]] * len(rooms)
        assert dst.untouched(np.concatenate([target for _, _, target in rooms]))
        assert cluster.balanced() == []


def offer(cluster: Cluster, room: int, _: Ints, target: Ints) -> RoomHandle:
    return cluster.decode().expect(room, 0, cluster.addresses, target, total_tokens=4 * len(target))


# -- A5: groups ------------------------------------------------------------------------------------------------------


@pytest.mark.row("A5")
@pytest.mark.parametrize("layers, group", [*itertools.product([1, 3, 4, 8, 9], [1, 2, 3, 8, 100])])
async def test_one_event_a_group_and_one_hand_over_a_group_chunk_and_destination(layers: int, group: int) -> None:
    device, src = FakeDevice(), Pool(layers=layers, seed=1)
    decodes = [Pool(layers=layers), Pool(layers=layers)]
    groups = -(-layers // group)
    async with Cluster(
        prefills=[src], decodes=decodes, config=config(layer_group=group), events=device, wrap=wrapped()
    ) as cluster:
        handles = [
            decode.expect(room, 0, cluster.addresses, ints(room, 9 + room), total_tokens=8, destinations=2)
            for room in (1, 2, 3)
            for decode in cluster.decodes
        ]
        cluster.forward([spec(room, ints(10 * room, 10 * room + 1)) for room in (1, 2, 3)])
        assert device.recorded == groups + 1, "the three chunks share each event; the end has its own"
        for handle in handles:
            prefill, _ = await outcomes(cluster, handle)
            kinds = Counter(span.kind for span in prefill.spans)
            assert kinds == {"group": 2 * groups, "fallback": 2}
            sizes = {span.layers for span in prefill.spans if span.kind == "group"}
            assert sizes == {tuple(range(at, min(at + group, layers))) for at in range(0, layers, group)}
        assert device.recorded == groups + 1


@pytest.mark.row("A5")
@given(hooked=st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=40).map(sorted), size=st.integers(1, 50))
def test_the_last_hooked_layer_closes_the_last_group(hooked: list[int], size: int) -> None:
    closing = closing_layers(tuple(hooked), fixed_groups(len(hooked), size))
    assert hooked[-1] in closing
    assert len(closing) == -(-len(hooked) // size)
    ends = [index for index, layer in enumerate(hooked) if layer in closing]
    assert all(b - a == size for a, b in itertools.pairwise([-1, *ends[:-1]]))


@pytest.mark.row("A5")
async def test_a_hook_that_closes_no_group_does_nothing_but_remember() -> None:
    device, src, dst = FakeDevice(), Pool(layers=6, seed=1), Pool(layers=6)
    async with Cluster(prefills=[src], decodes=[dst], config=config(layer_group=3), events=device) as cluster:
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        inbox = cluster.prefill_nodes[0].inbox
        await idle_turns()
        seen = []
        for layer in range(6):
            forward.layer_end(layer)
            await idle_turns()
            seen.append((device.recorded, inbox.deposits))
        first = seen[0]
        assert first[0] == 0
        assert seen == [(n, first[1] + n) for n in (0, 0, 1, 1, 1, 2)]
        forward.discard()


@pytest.mark.row("A5")
async def test_a_pass_without_chunks_does_nothing() -> None:
    device, src, dst = FakeDevice(), Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=device) as cluster:
        inbox = cluster.prefill_nodes[0].inbox
        for finish in ("end", "discard"):
            forward = cluster.forward([])
            getattr(forward, finish)()
            with pytest.raises(ZeroDivisionError), cluster.prefill().begin_forward([]) as raising:
                raising.layer_end(3)
                raise ZeroDivisionError
        assert (device.recorded, inbox.deposits, inbox.wakes) == (0, 0, 0)


# -- A6: each layer once, from its own forward -----------------------------------------------------------------------


@pytest.mark.row("A6", "A14", "A16")
@both_modes
@pytest.mark.parametrize("slow", ["no offer", "held write", "late event"])
@pytest.mark.parametrize("again", [False, True], ids=["others", "same chunk again"])
async def test_later_forwards_never_touch_a_slow_chunk(layerwise: bool, slow: str, again: bool) -> None:
    """Twenty forwards go over it, with or without registering the slow chunk again: its layers stay its own."""
    device, src, dst = FakeDevice(), Pool(), Pool()
    settings = config(layerwise=layerwise)
    async with Cluster(prefills=[src], decodes=[dst], config=settings, events=device, wrap=wrapped()) as cluster:
        model, engine = LateModel(src, device), faulty(cluster)
        hold = engine.add(Fault(hold=True)) if slow == "held write" else None
        target, chunk = ints(60, 61, 62), spec(99, SOURCE)
        expect = partial(cluster.decode().expect, 99, 0, cluster.addresses, target, total_tokens=12)
        handle = expect() if slow != "no offer" else None
        forward = cluster.prefill().begin_forward([chunk])
        model.forward(forward, SOURCE, 4, "slow")
        if slow != "late event":
            device.step(5, "slow")
        await idle_turns()
        for number in range(20):
            page = ints(10 + number)
            others = [spec(number, page), *([chunk] if again else [])]
            model.forward(cluster.prefill().begin_forward(others), page, 4)
            device.step(5)
            await idle_turns()
        assert not cluster.prefill().poll(99).ended
        if hold is not None:
            hold.release()
        device.run()
        prefill, _ = await outcomes(cluster, handle or expect())
        assert prefill.ok
        assert prefill.layers_fired == (4 if layerwise else 0)
        assert prefill.layers_fallback == (1 if layerwise else 5)
        assert src.differences(dst, SOURCE, target) == []
        assert written(engine.log, dst.layout) == once(expected_items(dst.layout, target))


@pytest.mark.row("A6")
async def test_a_hook_after_the_end_of_its_pass_reaches_nobody() -> None:
    src, dst = Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), wrap=wrapped()) as cluster:
        old = cluster.forward([spec(1, ints(1))], layers=())
        new = cluster.prefill().begin_forward([spec(2, ints(2))])
        for layer in range(4):
            old.layer_end(layer)
        old.end()
        old.discard()
        await idle_turns()
        assert (await live(cluster, 2)).chunks[0].taken == set()
        handles = [cluster.decode().expect(room, 0, cluster.addresses, ints(room), total_tokens=4) for room in (1, 2)]
        prefill, _ = await outcomes(cluster, handles[0])
        assert (prefill.layers_fired, prefill.layers_fallback) == (0, 5)
        new.end()
        prefill, _ = await outcomes(cluster, handles[1])
        assert (prefill.layers_fired, prefill.layers_fallback) == (0, 5)


@pytest.mark.row("A6")
async def test_a_notifier_points_at_one_pass() -> None:
    src, dst = Pool(seed=1), Pool()
    notifier = LayerNotifier()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), wrap=wrapped()) as cluster:
        handles = [cluster.decode().expect(room, 0, cluster.addresses, ints(room), total_tokens=4) for room in (1, 2)]
        notifier.layer_end(0)  # no pass: nothing
        first = cluster.prefill().begin_forward([spec(1, ints(1))])
        second = cluster.prefill().begin_forward([spec(2, ints(2))])
        notifier.enter(first)
        notifier.enter(first)
        with pytest.raises(KvferryError, match="still open"):
            notifier.enter(second)
        for layer in range(4):
            notifier.layer_end(layer)
        first.end()
        notifier.enter(second)
        for layer in range(2):
            notifier.layer_end(layer)
        notifier.leave()
        for layer in range(2, 4):
            notifier.layer_end(layer)
        second.end()
        fired = [(await outcomes(cluster, handle))[0].layers_fired for handle in handles]
        assert fired == [4, 2]


# -- A7: unfired layers ----------------------------------------------------------------------------------------------

HOOKS = {
    "all": (0, 1, 2, 3),
    "none": (),
    "the first": (0,),
    "without a closing one": (0, 2, 3),
    "without the last": (0, 1, 2),
    "backwards": (3, 2, 1, 0),
    "mixed": (2, 0, 3, 1),
    "each twice": (0, 0, 1, 1, 2, 2, 3, 3),
    "the forward twice": (0, 1, 2, 3, 0, 1, 2, 3),
    "layers there are not": (17, 0, 1, 4, 2, 99, 3, -1),
}


@pytest.mark.row("A7", "A15", "A16", "A14")
@both_kinds
@pytest.mark.parametrize("drafts", [0, 1, 2])
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
async def test_whatever_fires_every_buffer_arrives_once(kind: Kind, drafts: int, hooks: tuple[int, ...]) -> None:
    src, dst, twin = (Pool(kind=kind, drafts=drafts, seed=seed) for seed in (1, None, None))
    for layerwise, target in ((True, dst), (False, twin)):
        settings = config(layerwise=layerwise)
        async with Cluster(prefills=[src], decodes=[target], config=settings, wrap=wrapped()) as cluster:
            handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
            cluster.forward([spec(1, SOURCE, aux_slot=5)], layers=hooks)
            prefill, decode = await outcomes(cluster, handle)
            assert (prefill.ok, decode.ok) == (True, True)
            sent = written(faulty(cluster).log, target.layout)
            assert sent == once(expected_items(target.layout, TARGET, aux=[3]))
            assert prefill.bytes == decode.bytes == 3 * 64 * len(target.layout.unit_buffers("page")) + 32
    assert all(np.array_equal(array, twin.arrays[name]) for name, array in dst.arrays.items())
    assert src.differences(dst, SOURCE, TARGET) == []
    assert dst.untouched(TARGET)


@pytest.mark.row("A7", "A4")
@pytest.mark.parametrize("hooks", [(0, 1, 2, 3), (0, 1), ()])
async def test_the_unfired_go_in_one_batch_behind_one_end_event(hooks: tuple[int, ...]) -> None:
    """The end event stands behind the last writer, the draft forward included, and nothing unfired goes before it."""
    device, src, dst = FakeDevice(), Pool(drafts=2), Pool(drafts=2)
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=device, wrap=wrapped()) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        model = LateModel(src, device)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        for layer in range(6):
            model.layer(layer, SOURCE)
            if layer in hooks:
                forward.layer_end(layer)
        events_of_groups = device.recorded
        forward.end()
        assert (events_of_groups, device.recorded) == (len(hooks) // 2, len(hooks) // 2 + 1)
        device.step(5)  # all but the second draft layer
        room = await live(cluster, 1)
        await until(lambda: room.outstanding == 0 and len(room.spans) == len(hooks) // 2, "what fired has landed")
        await asked_again(cluster)
        assert {layer for layer in range(6) if not is_poison(dst, layer)} == set(hooks)
        device.step(1)
        prefill, _ = await outcomes(cluster, handle)
        rest = [span.layers for span in prefill.spans if span.kind in ("fallback", "whole")]
        assert rest == [tuple(layer for layer in range(6) if layer not in hooks)]
        assert src.differences(dst, SOURCE, TARGET) == []


@pytest.mark.row("A7")
async def test_a_model_without_any_hook_goes_whole() -> None:
    src, dst = Pool(layers=0, drafts=3, seed=1), Pool(layers=0, drafts=3)
    device = FakeDevice()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(1, SOURCE)], layers=range(3))
        prefill, _ = await outcomes(cluster, handle)
        assert device.recorded == 1
        assert (prefill.layers_fired, prefill.layers_fallback) == (0, 3)
        assert src.differences(dst, SOURCE, TARGET) == []


# -- A13, A16 --------------------------------------------------------------------------------------------------------


@pytest.mark.row("A13")
def test_the_loop_thread_selects_the_device_before_it_asks_it_anything() -> None:
    class Strict(FakeDevice):
        """Refuses to be asked by a thread that has not selected it."""

        def reached(self, stream: Hashable, position: int) -> bool:
            assert threading.get_ident() in self.loop_threads
            return super().reached(stream, position)

    device, fabric, src, dst = Strict(), LoopbackFabric(), Pool(seed=1), Pool()
    with EmbeddedLoop(config()) as loop:
        prefill = loop.start_prefill(fabric.engine(), src.layout, events=device)
        decode = loop.start_decode(fabric.engine(), dst.layout)
        thread = loop.call(lambda node: threading.get_ident())
        assert device.loop_threads == [thread]
        assert thread != threading.get_ident()
        handle = decode.expect(1, 0, [prefill.address], TARGET, total_tokens=12)
        with prefill.begin_forward([spec(1, SOURCE)]) as forward:
            for layer in range(4):
                forward.layer_end(layer)
        assert handle.wait(PATIENCE_S).ok
    assert src.differences(dst, SOURCE, TARGET) == []
    assert device.loop_threads == [thread]


@pytest.mark.row("A13")
async def test_without_chunks_no_device_is_needed_but_it_is_selected_all_the_same() -> None:
    device = FakeDevice()
    async with Cluster(prefills=[Pool(seed=1)], decodes=[], events=device):
        assert device.loop_threads == [threading.get_ident()]


@pytest.mark.row("A16", "A15")
@both_kinds
@both_modes
async def test_both_modes_send_the_same_pages_with_the_same_proof(kind: Kind, layerwise: bool) -> None:
    src, dst = Pool(kind=kind, seed=1, state_rows=4), Pool(kind=kind, state_rows=4)
    device = FakeDevice()
    settings = config(layerwise=layerwise)
    async with Cluster(prefills=[src], decodes=[dst], config=settings, events=device, wrap=wrapped()) as cluster:
        handle = cluster.decode().expect(
            1, 0, cluster.addresses, TARGET, total_tokens=11, aux_slot=1, state_rows=ints(3, 0)
        )
        cluster.forward([spec(1, SOURCE, end_token=11, aux_slot=6, state_rows=ints(1, 2))])
        device.run()
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (True, True)
        assert device.recorded == (3 if layerwise else 1)
        assert (prefill.layers_fired, prefill.layers_fallback) == ((4, 1) if layerwise else (0, 5))
        assert {span.kind for span in prefill.spans} == ({"group", "fallback"} if layerwise else {"whole"}) | {"aux"}
        assert written(faulty(cluster).log, dst.layout) == once(expected_items(dst.layout, TARGET, [1], [3, 0]))
        assert src.differences(dst, SOURCE, TARGET) == []
        assert np.array_equal(src.arrays["aux", 0][6], dst.arrays["aux", 0][1])
        assert np.array_equal(src.arrays["state", 0][[1, 2]], dst.arrays["state", 0][[3, 0]])
        assert (dst.arrays["aux", 0][[0, 2, 3, 4, 5, 6, 7]] == POISON).all()
        assert cluster.balanced() == []
