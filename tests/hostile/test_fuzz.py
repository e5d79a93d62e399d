"""Sequences that no peer would send, against a live sender and a live receiver.

A hostile decode (or prefill) speaks beside a good one: messages as they should be, the same with a field changed,
crafted ones, earlier frames again, frames of the good peer, frames with bytes flipped, noise. It knows the state: its
own numbers, rooms, sessions, and the good peer's names. After every sequence: nothing was raised, the good room's bytes
are all there, nothing but offered pages was written, and what was wrong has been counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.link import Link
from orchestrator.outcome import RoomStatus
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.codec import decode_envelope, encode
from protocols.errors import ConfigError, MalformedFrameError
from protocols.messages import (
    UNSEQUENCED,
    Abort,
    AbortAck,
    AnyMessage,
    Bye,
    Committed,
    Coverage,
    Done,
    Message,
    Offer,
    Ping,
    Refused,
    Rollover,
    RolloverAck,
    Units,
    Welcome,
    WrongIncarnation,
)
from tests.peers.raw import RawDecode, RawPeer, RawPrefill, settled
from tests.peers.scenes import DST, KEY, TOKENS, cluster, expect, landed, raw_decode, receiver, sender, spec
from tests.support.messages import messages
from tests.support.properties import examples
from tests.support.waiting import until

pytestmark = [pytest.mark.row("N9"), pytest.mark.row("C7"), pytest.mark.row("E5")]

OWN, GOOD = 6, KEY.room
"""The hostile peer's room, which the other side has registered, and the good one's."""
OWN_PAGES = [40, 41, 42, 43]

pages = st.one_of(
    st.just(OWN_PAGES),
    st.lists(st.one_of(st.integers(0, 63), st.sampled_from([-1, 64, 2**31 - 1])), max_size=6),
).map(lambda them: b"".join(page.to_bytes(4, "little", signed=True) for page in them))
rooms = st.sampled_from([OWN] * 8 + [7, 8, 2**63 - 1])
gens = st.sampled_from([1] * 8 + [0, 2, 2**64 - 1])
sessions = st.sampled_from(["own"] * 8 + ["good", "nowhere:1", ""])
numbers = st.one_of(st.integers(0, 70), st.sampled_from([2**31, 2**62, 2**63 - 1]))
status = st.sampled_from(["ok", "failed"])
run = st.tuples(numbers, numbers.map(lambda n: max(n, 1)))
units = st.builds(Units, pages=pages, aux=st.lists(numbers, max_size=3).map(tuple), state=pages)
text = st.text(max_size=8)

offers = st.builds(
    Offer,
    room=rooms,
    gen=gens,
    session=sessions,
    pages=pages,
    prefix_tokens=st.sampled_from([0, 0, 0, 4, 3, 2**63 - 1]),
    total_tokens=st.sampled_from([TOKENS, TOKENS, 0, 4, 2**63 - 1]),
    aux_slot=st.sampled_from([7, 7, None, 0, 8, 2**63 - 1]),
    state_rows=st.one_of(st.just(b""), pages),
    destinations=st.sampled_from([1, 1, 1, 2, 1024]),
    deadline_ms=st.sampled_from([60_000, 60_000, 0, 1]),
    dummy=st.sampled_from([False, False, True]),
)
coverages = st.lists(
    st.builds(
        Coverage,
        buffers=st.lists(numbers, max_size=4).map(tuple),
        offset=st.sampled_from([0, 0, 1, 2**63 - 1]),
        length=st.sampled_from([64, 64, 32, 2**63 - 1]),
        runs=st.lists(run, max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
dones = st.builds(Done, room=rooms, gen=gens, status=status, reason=text, coverage=coverages, bytes=numbers)
aborts = st.builds(Abort, room=rooms, gen=gens, origin=st.sampled_from(["prefill", "decode"]), reason=text)
acks = st.builds(AbortAck, room=rooms, gen=gens, session=sessions, unknown=units, in_doubt=units)
committed = st.builds(Committed, room=rooms, gen=gens, status=status, reason=text)
to_prefill = st.one_of(
    offers,
    offers,
    committed,
    aborts,
    st.builds(Rollover, old_session=sessions, session=sessions, layout=st.just("own"), deadline_ms=st.integers(0, 9)),
    st.builds(Ping, number=numbers, rooms=numbers),
    st.just(Bye()),
    messages(),
)
to_decode = st.one_of(
    dones,
    dones,
    aborts,
    acks,
    acks,
    st.builds(RolloverAck, session=sessions),
    st.builds(Ping, number=numbers),
    st.builds(Welcome, chosen=numbers, session_reused=st.booleans()),
    st.builds(Refused, reason=text, fields=st.dictionaries(st.sampled_from(["what", "self", "address", "x"]), text)),
    st.builds(WrongIncarnation, meant=st.binary(max_size=16)),
    st.just(Bye()),
    messages(),
)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "seq": st.one_of(st.integers(0, 5), st.sampled_from([1023, 1024, 2**62, 2**63 - 1])),
        "ack": st.one_of(st.integers(0, 5), st.just(2**63 - 1)),
        "src": st.sampled_from([b"", b"x" * 16, b"\x00" * 16]),
        "dst": st.sampled_from([b"", b"x" * 16]),
        "v": st.sampled_from([0, 2, -1]),
    },
)


def steps(sayable: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, Any, Any]]]:
    """What a hostile peer does: (verb, message or number, more)."""
    verbs = st.one_of(
        st.tuples(st.just("say"), sayable, st.just({})),
        st.tuples(st.just("say"), sayable, st.just({})),
        st.tuples(st.just("say"), sayable, envelopes),
        st.tuples(st.just("honest"), st.integers(0, 1), st.none()),
        st.tuples(st.just("honest"), st.integers(0, 1), st.none()),
        st.tuples(st.just("mutate"), sayable, st.tuples(st.integers(0, 400), st.integers(0, 255))),
        st.tuples(st.just("cut"), sayable, st.integers(0, 60)),
        st.tuples(st.just("replay"), st.integers(0, 99), st.none()),
        st.tuples(st.just("noise"), st.binary(max_size=40), st.none()),
        st.tuples(st.just("greet"), st.integers(0, 3), st.none()),
        st.tuples(st.just("wait"), st.none(), st.none()),
    )
    return st.lists(verbs, max_size=14)


class Hostile:
    """Carries the steps out through a raw peer."""

    def __init__(self, c: Cluster, raw: RawPeer, link: Callable[[], Link | None], named: dict[str, str]) -> None:
        """``link``: the other side's, as it stands."""
        self._c = c
        self._raw = raw
        self._link = link
        self._direction = "to_decode" if isinstance(raw, RawPrefill) else "to_prefill"
        self._named = named

    def frame(self, message: Message, envelope: dict[str, Any]) -> bytes:
        """It knows what number comes next, whatever became of the frames before."""
        raw = self._raw
        link = self._link()
        if link is not None:
            raw.next_seq = link._channel.ack + 1
        changes: dict[str, Any] = {}
        for field in ("session", "old_session"):
            if hasattr(message, field):
                said = getattr(message, field)
                changes[field] = self._named.get(said, said)
        if getattr(message, "layout", None) == "own":
            changes["layout"] = raw.layout
        stamp: dict[str, Any] = {"src": raw.me, "dst": raw.peer, "ack": raw.ack}
        if not isinstance(message, UNSEQUENCED):
            stamp["seq"] = raw.next_seq
        return encode(msgspec.structs.replace(message, **changes | stamp | envelope))

    async def do(self, verb: str, what: Any, more: Any) -> None:
        raw = self._raw
        match verb:
            case "say":
                raw.send_frame(self.frame(what, more))
            case "mutate":
                frame = bytearray(self.frame(what, {}))
                frame[more[0] % len(frame)] ^= more[1]
                raw.send_frame(bytes(frame))
            case "cut":
                raw.send_frame(self.frame(what, {})[: -1 - more])
            case "replay":
                heard = [frame for direction, frame in self._c.network.frames if direction == self._direction]
                raw.send_frame(heard[what % len(heard)])
            case "noise":
                raw.send_frame(what)
            case "greet":
                if isinstance(raw, RawPrefill):
                    raw.greet()
                else:
                    raw.send(raw.hello(dial=what), dst=b"")
            case "wait":
                await asyncio.sleep(0.003)
            case "honest":
                raw.send_frame(self.frame(self.honest(what), {}))
        await settled(3)

    def honest(self, which: int) -> Message:
        """What a good peer might say now."""
        raw = self._raw
        if isinstance(raw, RawDecode):
            offer = raw.offer(OWN, 1, OWN_PAGES, total_tokens=TOKENS, aux_slot=7)
            return offer if which else Committed(room=OWN, gen=1, status="ok")
        assert isinstance(raw, RawPrefill)
        offer = raw.all(Offer)[0]
        done = Done(room=OWN, gen=1, status="ok", coverage=raw.coverage(offer))
        return done if which else AbortAck(room=OWN, gen=1, session=offer.session)


def watched() -> list[dict[str, Any]]:
    """What reaches the loop's exception handler from now on."""
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    return raised


def untouched_but(pool: Pool, offered: set[int]) -> bool:
    return pool.untouched(np.array(sorted(offered), np.int64))


def offered_by(c: Cluster, me: bytes) -> set[int]:
    """Pages of every Offer that went out under this name and decodes."""
    found: set[int] = set()
    for direction, frame in c.network.frames:
        if direction == "to_prefill":
            try:
                message = msgspec.msgpack.decode(frame)
                if isinstance(message, dict) and message.get("type") == "offer" and message.get("src") == me:
                    found |= set(np.frombuffer(message["pages"], "<i4").tolist())
            except (msgspec.DecodeError, ValueError, TypeError, KeyError):
                continue
    return {page for page in found if 0 <= page < 64}


@settings(examples(120), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps(to_prefill), st.booleans())
def test_a_sender_outlives_any_decode(script: list[tuple[str, Any, Any]], first: bool) -> None:
    asyncio.run(against_a_sender(script, first))


async def against_a_sender(script: list[tuple[str, Any, Any]], first: bool) -> None:
    """``first``: the hostile peer's room is registered before it speaks, and so is written to while it does."""
    async with cluster() as c:
        raised = watched()
        good, pool = expect(c), c.decode_pools[0]
        await until(lambda: sender(c).rooms.live(KEY))
        raw = await raw_decode(c)
        links = sender(c).reception.links
        hostile = Hostile(c, raw, lambda: links.get(raw.me), {"own": raw.session, "good": receiver(c).session})
        if first:
            c.forward([spec(room=OWN)])
        for step in script:
            await hostile.do(*step)
        await settled()
        c.forward([spec(), spec(room=OWN)] if not first else [spec()])
        result = await asyncio.wait_for(good, 5)
        await settled()
        assert raised == []
        assert sender(c).counters["handler_errors"] == 0
        assert result.ok, result.error
        assert landed(c.prefill_pools[0], pool)
        assert untouched_but(pool, set(DST)), "the good decode's memory"
        assert untouched_but(raw.pool, offered_by(c, raw.me)), "the hostile one's"
        assert sender(c).counters["bad_frames"] >= sum(verb == "noise" for verb, _, _ in script)


@settings(examples(120), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps(to_decode))
def test_a_receiver_outlives_any_prefill(script: list[tuple[str, Any, Any]]) -> None:
    asyncio.run(against_a_receiver(script))


async def against_a_receiver(script: list[tuple[str, Any, Any]]) -> None:
    async with cluster() as c:
        raised = watched()
        raw = RawPrefill(c.network, Pool().layout)
        links = receiver(c).dialer.links
        hostile = Hostile(c, raw, lambda: links.get(raw.address), {"own": raw.session, "good": receiver(c).session})
        doomed = c.decode().expect(OWN, 1, [raw.address], OWN_PAGES, total_tokens=TOKENS, aux_slot=7)
        good, pool = expect(c), c.decode_pools[0]
        await raw.hear(Offer)
        for step in script:
            await hostile.do(*step)
        await settled()
        c.forward([spec()])
        result = await asyncio.wait_for(good, 5)
        await settled()
        assert raised == []
        assert receiver(c).counters["handler_errors"] == 0
        assert result.ok, result.error
        assert landed(c.prefill_pools[0], pool)
        assert untouched_but(pool, set(DST)), "nobody wrote for the hostile prefill"
        if raw.address in receiver(c).dialer.links:
            assert receiver(c).counters["bad_frames"] >= sum(verb == "noise" for verb, _, _ in script)
        if doomed.poll() is RoomStatus.SUCCESS:
            assert truthful(raw, script), "committed on a proof that was none"
        if doomed.poll() is RoomStatus.FAILED and not said_quiet(c, raw):
            assert not doomed.units_free(), "its units are free although nobody said they are quiet"


def truthful(raw: RawPrefill, script: list[tuple[str, Any, Any]]) -> bool:
    """Whether some Done of the script is exactly what an honest prefill would say."""
    honest = {entry.buffers: entry.runs for entry in raw.coverage(raw.all(Offer)[0])}
    said = [what for verb, what, _ in script if verb in ("say", "mutate") and isinstance(what, Done)]
    if any(verb == "honest" and what for verb, what, _ in script):
        return True
    return any({entry.buffers: entry.runs for entry in done.coverage} == honest for done in said)


def said_quiet(c: Cluster, raw: RawPrefill) -> bool:
    """Whether a frame went to the decode that may count as quiet, or as Done, for the hostile peer's room."""
    for direction, frame in c.network.frames:
        if direction == "to_decode":
            try:
                envelope = decode_envelope(frame)
            except MalformedFrameError:
                continue
            if envelope.src == raw.me and envelope.type in ("abort_ack", "done"):
                return True
    return False


@settings(examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.binary(max_size=80), messages().map(lambda m: encode_or_nothing(m))), max_size=20))
def test_strangers_are_only_counted(frames: list[bytes]) -> None:
    """Frames of a connection that never says a proper Hello."""
    asyncio.run(from_strangers(frames))


def encode_or_nothing(message: AnyMessage) -> bytes:
    try:
        return encode(message)
    except ConfigError:
        return b""


async def from_strangers(frames: list[bytes]) -> None:
    async with cluster() as c:
        raised = watched()
        good = expect(c)
        raw = RawPrefill(c.network, Pool().layout)  # only for its noise
        reception = sender(c).reception
        for nth, frame in enumerate(frames):
            reception.on_frame(bytes([nth + 1]) * 16, frame)
            reception.on_frame(b"", frame)
            receiver(c).dialer._on_frame(raw.address, frame)
            receiver(c).dialer._on_frame(c.addresses[0], frame) if not frame else None
        c.forward([spec()])
        assert (await asyncio.wait_for(good, 5)).ok
        assert raised == []
        counted = sum(sender(c).counters[name] for name in ("bad_frames", "wrong_incarnation", "hello_refused"))
        assert counted == 2 * len(frames)
