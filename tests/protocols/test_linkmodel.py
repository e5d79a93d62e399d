"""The link model learns latency, bandwidth and the cost of a block, and says how sure it is."""

from __future__ import annotations

import random
import statistics

import pytest

from protocols.linkmodel import MIN_OBSERVATIONS, LinkModel


def feed(model: LinkModel, rng: random.Random, count: int, noise: float, speed: float = 2e9) -> list[float]:
    """Random transfers over a link with 0.4 ms latency and 20 µs a block; relative errors of the predictions."""
    errors: list[float] = []
    for _ in range(count):
        nbytes = 16384 * rng.choice([1, 4, 64, 256, 1024, 4096])
        blocks = max(1, nbytes // rng.choice([16384, 65536, 1 << 20]))
        seconds = (0.0004 + nbytes / speed + blocks * 2e-5) * rng.uniform(1 - noise, 1 + noise)
        predicted = model.predict(nbytes, blocks)
        if predicted is not None:
            errors.append(abs(predicted - seconds) / seconds)
        model.observe(nbytes, blocks, seconds)
    return errors


@pytest.mark.row("N7")
def test_it_predicts_within_the_noise_after_fifty_transfers() -> None:
    model, rng = LinkModel(), random.Random(1)
    feed(model, rng, 50, 0.1)
    assert statistics.median(feed(model, rng, 200, 0.1)) <= 0.15
    assert model.error <= 0.15
    costs = model.costs()
    assert costs.byte_s == pytest.approx(1 / 2e9, rel=0.2)
    assert costs.block_s == pytest.approx(2e-5, rel=0.2)
    assert costs.latency_s == pytest.approx(0.0004, rel=0.3)


@pytest.mark.row("N7")
def test_it_follows_a_link_that_became_slower() -> None:
    model, rng = LinkModel(), random.Random(2)
    feed(model, rng, 100, 0.05)
    feed(model, rng, 150, 0.05, speed=5e8)
    assert statistics.median(feed(model, rng, 50, 0.05, speed=5e8)) <= 0.15


def test_it_says_nothing_before_it_knows() -> None:
    model = LinkModel()
    for _ in range(MIN_OBSERVATIONS - 1):
        model.observe(4096, 1, 0.001)
        assert model.predict(4096, 1) is None
    model.observe(4096, 1, 0.001)
    assert model.predict(4096, 1) == pytest.approx(0.001, rel=0.01)


def test_costs_are_never_negative() -> None:
    """Observations that contradict each other would otherwise be fitted by a negative latency."""
    model, rng = LinkModel(), random.Random(3)
    for _ in range(100):
        model.observe(rng.randrange(1, 1 << 20), rng.randrange(1, 64), rng.uniform(1e-5, 1e-1), starts=rng.randrange(2))
        costs = model.costs()
        assert min(costs.latency_s, costs.byte_s, costs.block_s) >= 0


def test_nothing_is_learnt_from_nothing() -> None:
    model = LinkModel()
    model.observe(0, 0, 1.0)
    model.observe(100, 1, 0.0)
    assert model.observations == 0
