import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import channel
from protocols.channel import FIRST_RETRY_S, LAST_RETRY_S, MAX_HELD, Channel
from protocols.errors import BrokenPeerError
from protocols.messages import Abort, AnyMessage
from tests.support.channels import Pair, deliver, drop, duplicate, pair, post, reorder, send, settle
from tests.support.properties import examples


def message(number: int = 0) -> Abort:
    return Abort(room=number, gen=0, origin="decode", reason="")


def rooms(messages: list[AnyMessage]) -> list[int]:
    return [each.room for each in messages if isinstance(each, Abort)]


def assert_ended(both: Pair) -> None:
    """Exactly once, in order, all acknowledged, nothing left to do."""
    assert both.b.received == both.a.posted
    assert both.a.received == both.b.posted
    for end in (both.a, both.b):
        assert end.channel.unacked == 0
        assert end.channel.next_due() is None
        assert not end.channel.ack_owed
        assert end.channel.ack == len(end.received)


steps = st.one_of(
    st.tuples(st.just("post"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["send", "deliver", "drop", "duplicate", "reorder"]), st.integers(0, 9)),
    st.tuples(st.just("lose all"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


@pytest.mark.row("C7")
@examples(200)
@given(st.lists(st.tuples(st.booleans(), steps), max_size=60), st.integers(0, 100))
def test_exactly_once_and_in_order_whatever_the_network_does(
    script: list[tuple[bool, tuple[str, int]]], seed: int
) -> None:
    both = pair(seed)
    for first, (what, number) in script:
        end = both.a if first else both.b
        match what:
            case "post":
                for _ in range(number):
                    post(both, end)
            case "send":
                send(both, end)
            case "deliver":
                deliver(end, number)
            case "drop":
                drop(end, number)
            case "duplicate":
                duplicate(end, number)
            case "reorder":
                reorder(end, number)
            case "lose all":
                drop(both.a)
                drop(both.b)
            case "wait":
                both.now += number / 4
        for mine, theirs in ((both.a, both.b), (both.b, both.a)):
            assert mine.received == theirs.posted[: len(mine.received)], "in order, at any time"
    settle(both)
    assert_ended(both)


def test_nothing_is_sent_twice_on_a_good_network() -> None:
    both = pair()
    for _ in range(10):
        post(both, both.a)
    settle(both)
    assert_ended(both)
    assert both.a.frames_sent == 10
    assert both.b.frames_sent == 1, "one frame acknowledges them all"


@pytest.mark.row("C1")
def test_what_is_lost_is_sent_again_until_acknowledged() -> None:
    both = pair()
    post(both, both.a)
    for _ in range(20):
        send(both, both.a)
        drop(both.b)
        both.now += 2 * LAST_RETRY_S
    assert both.a.frames_sent == 20
    settle(both)
    assert_ended(both)
    both.now += 100
    send(both, both.a)
    assert both.a.frames_sent == 21


@pytest.mark.row("C1")
def test_a_lost_acknowledgement_costs_a_frame_and_no_second_delivery() -> None:
    both = pair()
    post(both, both.a)
    send(both, both.a)
    deliver(both.b)
    send(both, both.b)
    drop(both.a)
    settle(both)
    assert_ended(both)
    assert both.a.frames_sent == 2


def test_a_channel_survives_the_connection() -> None:
    both = pair()
    for _ in range(3):
        post(both, both.a)
        post(both, both.b)
        send(both, both.a)
        send(both, both.b)
        drop(both.a)
        drop(both.b)
    settle(both)
    assert_ended(both)


def test_sequence_numbers_start_at_one_and_have_no_gaps() -> None:
    it = Channel(random.Random(0))
    for number in range(3):
        it.post(message(number), 0.0)
    sent = it.take_due(0.0)
    assert [each.seq for each in sent] == [1, 2, 3]
    assert rooms(sent) == [0, 1, 2]
    assert (it.unacked, it.ack, it.ack_owed) == (3, 0, False)


def test_a_posted_message_is_due_at_once_and_only_once() -> None:
    it = Channel(random.Random(0))
    assert it.next_due() is None
    it.post(message(), 5.0)
    assert it.next_due() == 5.0
    assert it.take_due(4.9) == []
    assert len(it.take_due(5.0)) == 1
    assert it.take_due(5.0) == []


@given(st.integers(0, 1000))
def test_the_delay_doubles_with_jitter_up_to_its_limit(seed: int) -> None:
    it = Channel(random.Random(seed))
    now = 0.0
    it.post(message(), now)
    for attempt in range(30):
        assert len(it.take_due(now)) == 1
        due = it.next_due()
        assert due is not None
        plain = min(FIRST_RETRY_S * 2**attempt, LAST_RETRY_S)
        assert 0.75 * plain <= due - now <= 1.25 * plain
        now = due


def test_jitter_differs_between_channels() -> None:
    dues = set()
    for seed in range(5):
        it = Channel(random.Random(seed))
        it.post(message(), 0.0)
        it.take_due(0.0)
        dues.add(it.next_due())
    assert len(dues) == 5


def test_next_due_is_the_earliest() -> None:
    it = Channel(random.Random(0))
    it.post(message(), 0.0)
    it.take_due(0.0)
    it.post(message(), 0.1)
    assert it.next_due() == 0.1


def test_an_acknowledgement_covers_all_up_to_it() -> None:
    it = Channel(random.Random(0))
    for number in range(4):
        it.post(message(number), 0.0)
    it.acked(2)
    assert rooms(it.take_due(0.0)) == [2, 3]
    it.acked(1)
    assert it.unacked == 2, "an old one changes nothing"
    it.acked(0)
    assert it.unacked == 2


def test_an_acknowledgement_of_what_was_never_sent_settles_nothing_to_come() -> None:
    it = Channel(random.Random(0))
    it.acked(2**63)
    it.post(message(7), 0.0)
    assert rooms(it.take_due(0.0)) == [7]


@pytest.mark.row("C7")
def test_a_bad_body_uses_its_number_up() -> None:
    it = Channel(random.Random(0))
    assert it.receive(1, None) == []
    assert it.ack == 1
    assert it.receive(3, message(3)) == []
    assert rooms(it.receive(2, None)) == [3]
    assert it.ack == 3
    assert it.receive(2, message(2)) == [], "it does not come back better"


@pytest.mark.row("C7")
def test_what_arrives_early_is_held_within_a_bound() -> None:
    it = Channel(random.Random(0))
    assert it.receive(MAX_HELD + 1, message()) == []
    for seq in range(MAX_HELD, 1, -1):
        assert it.receive(seq, message(seq)) == []
    assert rooms(it.receive(1, message(1))) == list(range(1, MAX_HELD + 1))
    assert it.ack == MAX_HELD, "the one beyond the bound was not kept"
    assert rooms(it.receive(MAX_HELD + 1, message(0))) == [0]


@pytest.mark.row("C7")
def test_a_duplicate_is_dropped_but_acknowledged_again() -> None:
    it = Channel(random.Random(0))
    assert rooms(it.receive(1, message(1))) == [1]
    it.ack_owed = False
    assert it.receive(1, message(1)) == []
    assert it.ack_owed
    it.ack_owed = False
    assert it.receive(3, message(3)) == []
    assert it.receive(3, message(99)) == [], "the first of a number counts"
    assert rooms(it.receive(2, message(2))) == [2, 3]


def test_a_number_that_no_message_has_delivers_nothing() -> None:
    it = Channel(random.Random(0))
    assert it.receive(0, message()) == []
    assert it.ack == 0


@pytest.mark.row("C7")
def test_a_peer_that_acknowledges_nothing_is_broken_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_UNACKED", 3)
    it = Channel(random.Random(0))
    for number in range(3):
        it.post(message(number), 0.0)
    with pytest.raises(BrokenPeerError, match="acknowledges nothing"):
        it.post(message(3), 0.0)
    assert rooms(it.take_due(0.0)) == [0, 1, 2]
    it.acked(1)
    it.post(message(3), 0.0)
    assert [each.seq for each in it.take_due(0.0)] == [4], "the refused one took no number"


def test_more_than_the_peer_holds_still_arrives() -> None:
    both = pair()
    for _ in range(3 * MAX_HELD):
        post(both, both.a)
    send(both, both.a)
    drop(both.b, 0)
    settle(both)
    assert_ended(both)
