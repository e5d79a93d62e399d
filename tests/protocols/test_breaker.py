import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.breaker import FIRST_PAUSE_S, LAST_PAUSE_S, THRESHOLD, Breaker, BreakerState


def opened(seed: int = 0, now: float = 0.0) -> Breaker:
    breaker = Breaker(random.Random(seed))
    for _ in range(THRESHOLD):
        breaker.failed(now)
    return breaker


@pytest.mark.row("B5")
def test_one_failure_blacklists_nobody() -> None:
    breaker = Breaker(random.Random(0))
    for _ in range(THRESHOLD - 1):
        breaker.failed(0.0)
        assert breaker.allow(0.0)
        assert breaker.retry_in(0.0) == 0.0
    breaker.failed(0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow(0.0)


@pytest.mark.row("B5")
def test_failures_count_from_the_last_success() -> None:
    breaker = Breaker(random.Random(0))
    for _ in range(3 * THRESHOLD):
        for _ in range(THRESHOLD - 1):
            breaker.failed(0.0)
        breaker.succeeded()
        assert breaker.state is BreakerState.CLOSED


@pytest.mark.row("B5")
def test_after_the_pause_one_probe_goes_and_no_other() -> None:
    breaker = opened()
    later = breaker.retry_in(0.0)
    assert not breaker.allow(later - 0.001)
    assert breaker.allow(later)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.retry_in(later) == 0.0
    assert not breaker.allow(later)
    assert not breaker.allow(later + 1000.0)
    breaker.succeeded()
    assert breaker.allow(later)


@pytest.mark.row("B5")
@given(st.integers(0, 1000))
def test_the_pause_doubles_with_jitter_up_to_its_limit(seed: int) -> None:
    breaker = opened(seed)
    now = 0.0
    for attempt in range(12):
        plain = min(FIRST_PAUSE_S * 2**attempt, LAST_PAUSE_S)
        pause = breaker.retry_in(now)
        assert 0.75 * plain <= pause <= 1.25 * plain
        now += pause
        assert breaker.allow(now + 1e-6)
        now += 1e-6
        breaker.failed(now)
        assert breaker.state is BreakerState.OPEN
    breaker.succeeded()
    for _ in range(THRESHOLD):
        breaker.failed(now)
    assert breaker.retry_in(now) <= 1.25 * FIRST_PAUSE_S, "a success forgets the pauses"


events = st.lists(st.sampled_from(["ask", "fail", "succeed", "wait"]), max_size=60)


@pytest.mark.row("B5")
@given(events, st.integers(0, 50))
def test_an_open_breaker_always_comes_to_a_probe(script: list[str], seed: int) -> None:
    breaker = Breaker(random.Random(seed))
    now = 0.0
    for what in script:
        match what:
            case "ask":
                before = breaker.state
                allowed = breaker.allow(now)
                assert allowed == (before is BreakerState.CLOSED or breaker.state is not before)
            case "fail":
                breaker.failed(now)
            case "succeed":
                breaker.succeeded()
                assert breaker.allow(now)
            case "wait":
                now += 1.0
        assert 0.0 <= breaker.retry_in(now) <= 1.25 * LAST_PAUSE_S
        if breaker.state is BreakerState.OPEN:
            assert breaker.retry_in(now + 1.25 * LAST_PAUSE_S) == 0.0
