"""The simulation finds the bugs it exists for: each planted one, in few seeds, and its replay shows it again."""

from __future__ import annotations

import pytest

from orchestrator.testing.planted import PLANTS, planted
from orchestrator.testing.simulate import run_seed
from orchestrator.testing.simulation import Result

SOON = (
    "done-before-landed",
    "freed-on-first-ack",
    "late-offer-honoured",
    "layer-read-before-event",
    "page-freed-on-timeout",
    "quiet-though-in-doubt",
    "relative-chunk-offset",
    "source-freed-on-cancel",
)
"""Found within a few dozen seeds."""
EXPECTED = {
    "page-freed-on-timeout": {"V3"},
    "quiet-though-in-doubt": {"V3"},
    "wrong-incarnation-acked": {"V3"},
    "writer-death-is-a-fence": {"V3"},
    "freed-on-first-ack": {"V3"},
    "fence-across-sessions": {"V3"},
    "late-offer-honoured": {"V3", "N11", "dead:", "V8"},
    "relative-chunk-offset": {"V1"},
    "source-freed-on-cancel": {"V2"},
    "layer-read-before-event": {"V2"},
    "done-before-landed": {"V1", "V3", "V4"},
}
"""Which invariant each breaks; it may break others with it."""


def shows(result: Result, name: str) -> bool:
    return any(violation.name.split()[0] in EXPECTED[name] for violation in result.violations)


def find(name: str, seeds: int) -> Result:
    """The first seed that shows the bug."""
    for seed in range(seeds):
        result = run_seed(seed, name)
        if shows(result, name):
            return result
    pytest.fail(f"{name} was not found in {seeds} seeds")


def check(name: str, seeds: int) -> None:
    found = find(name, seeds)
    seed = found.workload.seed
    assert run_seed(seed, name).violations == found.violations, "the replay shows the same"
    assert not run_seed(seed).violations, "without the bug the seed is clean"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.row("N2")
@pytest.mark.parametrize("name", SOON)
def test_found_soon(name: str) -> None:
    check(name, 100)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.row("N2")
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_found_within_five_hundred_seeds(name: str) -> None:
    check(name, 500)


def test_every_planted_bug_says_what_it_breaks_and_is_gone_afterwards() -> None:
    assert set(EXPECTED) == set(PLANTS)
    for name, make in PLANTS.items():
        assert make.__doc__
        before = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in make()]
        with planted(name):
            assert all(vars(owner)[attribute] is not value for owner, attribute, value in before)
        assert all(vars(owner)[attribute] is value for owner, attribute, value in before)
    with pytest.raises(KeyError), planted("no such bug"):
        pass
