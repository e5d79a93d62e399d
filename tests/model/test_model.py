"""The exhaustive model: every configuration explored, and what it takes for granted."""

from __future__ import annotations

import sys

import pytest

from orchestrator.testing.model import properties, state
from orchestrator.testing.model.bounds import DEEP, FULL, QUICK, Bounds
from orchestrator.testing.model.faults import PLANTED
from orchestrator.testing.model.runner import Report, check_all, check_channel, explored
from orchestrator.testing.model.system import System

LEAST_STATES = 1_200_000
"""Explored in the full lane, all configurations together: fewer means that something is not modelled any more."""


def told(reports: list[Report]) -> list[Report]:
    """Print what was explored, also when nothing fails."""
    out = sys.__stdout__
    if out is not None:
        total = sum(report.states for report in reports), sum(report.transitions for report in reports)
        lines = [*map(str, reports), f"model: {total[0]:,} states and {total[1]:,} transitions explored"]
        out.write("\n" + "\n".join(lines) + "\n")
        out.flush()
    return reports


def assert_sound(reports: list[Report]) -> None:
    wrong = [report for report in reports if report.violation]
    assert not wrong, "\n".join(wrong[0].counterexample)


@pytest.mark.row("N1")
@pytest.mark.parametrize("bounds", QUICK, ids=lambda bounds: bounds.name)
def test_the_smallest_configurations_hold(bounds: Bounds) -> None:
    report = explored(System(bounds))
    assert_sound([report])
    assert report.ends > 1


@pytest.mark.row("N1")
def test_the_channel_delivers_once_and_in_order_over_any_network() -> None:
    report = check_channel()
    assert_sound([report])
    assert report.states > 2_000


@pytest.mark.row("N1")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_configuration_holds(capfd: pytest.CaptureFixture[str]) -> None:
    """V3, V4 and V5 in every state, nothing owed once nothing is in flight, and an end within reach of every state."""
    reports = list(check_all(FULL))
    with capfd.disabled():
        told(reports)
    assert_sound(reports)
    assert sum(report.states for report in reports) >= LEAST_STATES
    assert all(report.states > 800 and report.ends > 1 for report in reports)


@pytest.mark.row("N1")
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_larger_bounds_hold(capfd: pytest.CaptureFixture[str]) -> None:
    reports = list(check_all(DEEP))
    with capfd.disabled():
        told(reports)
    assert_sound(reports)
    assert sum(report.states for report in reports) >= 4_000_000


def test_a_counterexample_is_told_step_by_step() -> None:
    fault = next(fault for fault in PLANTED if fault.name == "a failed write is called quiet")
    report = explored(fault.system(QUICK[0]))
    assert report.violation.startswith("V3: page 0 is free")
    steps = [line.split(maxsplit=1)[1] for line in report.counterexample if line[:4].strip().isdigit()]
    assert steps[0] == "decode 0   expects gen 1 in pages [0, 1]"
    assert any("submits page 0 of gen 1 to decode 0" in step for step in steps)
    assert any("page 0 of gen 1 at decode 0: FAILED (and may land later)" in step for step in steps)
    assert "→ decode 0: AbortAck(gen 1, unknown [], in doubt [])" in "\n".join(report.counterexample)
    assert report.counterexample[-1].endswith("for gen 1: FAILED, or its writer died")


def test_every_configuration_says_its_bounds() -> None:
    for bounds in (*FULL, *DEEP):
        text = str(bounds)
        assert f"{bounds.decodes} decode x {bounds.prefills} prefill" in text
        assert ("reuse ports" in text) == bounds.reuse_ports
    assert {(bounds.decodes, bounds.prefills) for bounds in FULL} >= {(1, 2), (2, 1)}
    assert all(bounds.pages == 2 for bounds in FULL)


def test_a_write_may_land_until_a_fence_also_when_its_writer_died() -> None:
    """The assertion V3 itself: a page is safe while it is under the lease of the room that it is written for."""
    side = System(QUICK[0]).decodes.values or [next(iter(_start(QUICK[0])))]
    for running in (True, False):
        write = state.Write(rank=0, gen=1, page=0, session=0, running=running)
        assert "page 0 is free" in properties.unsafe(side[0], frozenset({write}))
        assert not properties.unsafe(side[0], frozenset({write._replace(reaches=False)}))


def _start(bounds: Bounds) -> list[state.DecodeSide]:
    system = System(bounds)
    return [system.decodes.values[system.start()[0]]]
