"""The parts of the soak: what it would notice, what it plans, how it judges; and a small one of it all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.testing.pool import Pool
from scripts.soaking.__main__ import main
from scripts.soaking.content import Content, expected
from scripts.soaking.plan import Plan, Planned, Shape
from scripts.soaking.report import Report
from scripts.soaking.units import FreeUnits
from scripts.soaking.verdict import REUSED, judge, left_over

PAGES = [5, 2, 9]


def written(room: int = 7, gen: int = 1) -> Content:
    content = Content(Pool(pages=16))
    for layer in range(content.pool.layers):
        content.write_layer(layer, room, gen, PAGES, 3)
    content.write_drafts(room, gen, PAGES, 3)
    content.write_aux(room, gen, 1)
    return content


def test_content_is_that_of_one_room_generation_position_and_buffer() -> None:
    content = written()
    assert content.differences(7, 1, PAGES, 3, 1) == []
    for other in ((8, 1, PAGES, 3), (7, 2, PAGES, 3), (7, 1, PAGES, 4), (7, 1, [2, 5, 9], 3)):
        room, gen, pages, first = other
        assert len(content.differences(room, gen, pages, first, None)) >= 2 * 10, "every buffer of two pages at least"
    assert len({expected(7, 1, buffer, [3], 64).tobytes() for buffer in range(50)}) == 50
    assert content.differences(8, 1, [], 0, 1) == ["aux slot 1"]


def test_one_wrong_byte_is_found_and_named() -> None:
    content = written()
    content.pool.arrays[("v", 2)][9, 63] ^= 1
    number = [*content.pool.arrays].index(("v", 2))
    assert content.differences(7, 1, PAGES, 3, 1) == [f"buffer {number} page 9 position 5"]


def test_a_write_into_a_free_page_is_found() -> None:
    content = written()
    assert content.strays([*range(16)]) == sorted(PAGES)
    content.poison(PAGES)
    assert content.strays([*range(16)]) == []
    content.pool.arrays[("draft_k", 4)][3, 0] = 0
    assert content.strays([*range(16)]) == [3]


def test_a_plan_tiles_its_rooms_reuses_ids_and_aborts_a_tenth() -> None:
    shape = Shape()
    plan, twin = Plan(5, 2, shape), Plan(5, 2, shape)
    planned = [plan.next() for _ in range(4000)]
    assert planned == [twin.next() for _ in range(4000)]
    for each in planned:
        starts, ends = zip(*each.chunks, strict=True)
        assert (starts[0], ends[-1]) == (0, each.tokens)
        assert starts[1:] == ends[:-1]
        assert all(start % shape.page_size == 0 for start in starts)
        assert 1 <= -(-each.tokens // shape.page_size) <= shape.max_pages
    assert 0.09 < sum(each.abort is not None for each in planned) / len(planned) < 0.13
    assert {each.abort for each in planned} == {None, "prefill", "decode"}
    assert len({(each.room, each.gen) for each in planned}) == len(planned)
    plan.again(planned[3])
    following = plan.next()
    assert (following.room, following.gen) == (planned[3].room, planned[3].gen + 1)


PLANNED = Plan(1, 1, Shape()).next()
OK: dict[str, Any] = {"ok": True, "aborted": False, "error": ""}
FAILED: dict[str, Any] = {"ok": False, "aborted": False, "error": "why"}
ABORTED: dict[str, Any] = {"ok": False, "aborted": True, "error": "went away"}


@pytest.mark.parametrize(
    "decode, prefill, kind",
    [
        (OK, OK, "ok"),
        (None, FAILED, "killed"),
        (None, OK, "killed"),
        (ABORTED, FAILED, "aborted"),
        (FAILED, ABORTED, "aborted"),
        (OK, ABORTED, "aborted"),
        (OK | {"aborted": True}, FAILED, "violation"),
        (FAILED, OK, "violation"),
        (ABORTED, OK, "violation"),
        (OK, FAILED, "violation"),
        (FAILED, FAILED, "violation"),
        (FAILED | {"error": f"{REUSED}, and late writes"}, FAILED, "refused"),
    ],
)
def test_a_room_is_judged_by_both_its_outcomes(
    decode: dict[str, Any] | None, prefill: dict[str, Any], kind: str
) -> None:
    planned: Planned = PLANNED
    verdict = judge(planned, decode, prefill)
    assert verdict.kind == kind
    assert bool(verdict.why) is (kind in ("violation", "refused"))


def test_what_is_left_in_a_table_is_told() -> None:
    empty = {"rooms": [], "taken": 0, "tasks": 0, "open": 0, "rollover": "IDLE"}
    assert left_over("decode", empty) == []
    assert left_over("decode", empty | {"taken": 3, "rollover": "FENCED"}) == ["taken: 3", "rollover: FENCED"]


def test_the_slope_of_memory_is_that_after_the_warm_up() -> None:
    report = Report(seed=1, rooms=1000, seconds=10.0)
    report.memory = [(rooms, 10**6 + (10**6 if rooms < 200 else 0) + 50 * rooms) for rooms in range(0, 1001, 50)]
    assert report.slope == pytest.approx(50)
    assert json.loads(json.dumps(report.to_json()))["rss_slope_bytes_per_room"] == pytest.approx(50)
    assert "+50 bytes a room" in report.text()
    assert "no violation" in report.text()
    report.violations.append("page 3")
    assert "VIOLATION: page 3" in report.text()


async def test_the_units_freed_last_go_first_and_waiters_are_served_in_order() -> None:
    units = FreeUnits(4)
    first = await units.take(3)
    units.give(first[:1])
    assert await units.take(1) == first[:1]
    waits = [asyncio.create_task(units.take(2)), asyncio.create_task(units.take(1))]
    await asyncio.sleep(0)
    units.give(first[:1])
    assert len(units) == 0
    assert [len(await wait) for wait in waits[:1]] == [2]
    units.give([7])
    assert await waits[1] == [7]


@pytest.mark.mooncake
@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.row("C4", "C5")
def test_a_small_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    assert main(["--rooms", "60", "--kills", "1", "--json", str(file)]) == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert (report["rooms"], report["kills"]) == (60, 1)
    assert (report["corrupt_pages"], report["stray_writes"], report["stuck_rooms"], report["left"]) == (0, 0, 0, {})
    assert report["verified_pages"] > 100


@pytest.mark.mooncake
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.row("C4", "C5", "C8")
def test_the_quick_soak_takes_less_than_two_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    assert main(["--quick", "--json", str(file)]) == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["rooms"] == 500
    assert report["seconds"] < 120
