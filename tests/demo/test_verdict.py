"""The demo's comparison, and that it can say no."""

from __future__ import annotations

import pytest

from orchestrator.demo.verdict import ALL_EQUAL, Timing, compare
from tests.demo import samples


def wrong(name: str, position: int, value: str = "other") -> dict[str, list[str]]:
    """The sample digests with one hash changed."""
    hashes = list(samples.PAGES[name])
    hashes[position] = value
    return samples.PAGES | {name: hashes}


def test_equal_is_equal() -> None:
    assert compare(samples.single(), samples.prefill(), samples.decode()) == ALL_EQUAL
    assert ALL_EQUAL.all


def test_the_tail_of_the_last_page_need_not_be_the_single_process_s() -> None:
    assert compare(samples.single(pages=wrong("k[0]", 3)), samples.prefill(), samples.decode()).all


def test_the_tail_of_the_last_page_must_be_the_prefill_s() -> None:
    equal = compare(samples.single(), samples.prefill(), samples.decode(pages=wrong("k[0]", 3)))
    assert (equal.pages, equal.draft) == (False, True)
    assert equal.remarks == ("k[0]: 1 wrong pages, the first at position 2",)


def test_a_wrong_page_is_named() -> None:
    equal = compare(samples.single(), samples.prefill(), samples.decode(pages=wrong("v[1]", 1)))
    assert (equal.tokens, equal.logits, equal.pages, equal.draft) == (True, True, False, True)
    assert equal.remarks == ("v[1]: 1 wrong pages, the first at position 1",)


def test_pages_that_agree_with_the_prefill_but_not_with_the_single_process_are_wrong() -> None:
    pages = wrong("k[1]", 0)
    assert not compare(samples.single(), samples.prefill(pages=pages), samples.decode(pages=pages)).pages


def test_draft_pages_are_judged_apart() -> None:
    equal = compare(samples.single(), samples.prefill(), samples.decode(pages=wrong("draft_k[2]", 0)))
    assert (equal.tokens, equal.logits, equal.pages, equal.draft) == (True, True, True, False)


def test_logits_tell_where_they_part() -> None:
    equal = compare(samples.single(), samples.prefill(), samples.decode(logits=["c"]))
    assert (equal.logits, equal.remarks) == (False, ("logits differ first at step 1",))
    equal = compare(samples.single(), samples.prefill(), samples.decode(logits=["b", "c"]))
    assert (equal.logits, equal.remarks) == (False, ("logits differ first at step 2",))


def test_a_first_token_that_is_not_the_prefill_s_is_unequal() -> None:
    assert not compare(samples.single(), samples.prefill(first_token=6), samples.decode()).tokens
    assert not compare(samples.single(), samples.prefill(), samples.decode(tokens=[5, 7])).tokens


def test_missing_buffers_are_wrong() -> None:
    fewer = {name: hashes for name, hashes in samples.PAGES.items() if name != "k[0]"}
    assert not compare(samples.single(), samples.prefill(), samples.decode(pages=fewer)).pages
    shorter = samples.PAGES | {"k[0]": ["p0"]}
    assert not compare(samples.single(), samples.prefill(), samples.decode(pages=shorter)).pages


@pytest.mark.row("A16")
def test_equality_is_the_and_over_all_modes_and_repeats() -> None:
    case = samples.case()
    assert case.equal.all
    case.transfers["monolithic_paced"].append(samples.transfer(logits=["c"]))
    assert (case.equal.tokens, case.equal.logits) == (True, False)


def test_an_empty_run_is_not_ok() -> None:
    assert samples.results().ok
    assert not samples.results(cases=[]).ok


def test_timings_are_medians_and_exposed_time_is_never_negative() -> None:
    case = samples.case()
    timings = case.timings
    assert list(timings) == ["single", "monolithic", "layerwise", "monolithic_paced", "layerwise_paced"]
    assert timings["single"] == Timing(2.0, 0.0, 2.0)
    assert timings["monolithic_paced"].exposed_s == pytest.approx(0.9)
    assert timings["layerwise_paced"].ttft_s == pytest.approx(2.251)
    assert samples.transfer(101.0).timing.exposed_s == 0.0
    assert case.layerwise is case.transfers["layerwise_paced"][-1]
