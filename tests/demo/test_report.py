"""What the demo prints and writes, from fixed data."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.demo import files, report
from orchestrator.demo.driver import Results
from orchestrator.demo.picture import Timeline, draw
from orchestrator.trace import Span
from protocols.errors import ConfigError
from tests.demo import samples


def printed(results: Results, width: int = 150) -> str:
    console = Console(width=width, record=True, color_system=None)
    with console.capture() as capture:
        report.show(results, console)
    return capture.get()


def test_the_table_has_a_row_per_way() -> None:
    text = printed(samples.results(), width=80)
    rows = [line for line in text.splitlines() if "yes" in line]
    assert len(rows) == 4
    for title in ("monolithic", "layer-wise", "monolithic paced ×3", "layer-wise paced ×3"):
        assert any(title in row for row in rows)
    assert "Tiny over mooncake, completion mode one-block" in text
    assert "1 Gb/s" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "exposed, paced link: monolithic 900.0 ms, layer-wise 250.0 ms (medians of 3)" in text
    assert "decode says: Hi" in text
    assert "EQUAL to the single process" in text


def test_an_unequal_run_says_no_and_where() -> None:
    results = samples.results()
    results.cases[0].transfers["layerwise"] = [samples.transfer(logits=["c"])]
    text = printed(results)
    assert "NOT EQUAL" in text
    assert "1 long: logits differ first at step 1" in text
    assert sum("NO" in line for line in text.splitlines()) == 2


def test_markup_in_texts_is_shown_as_it_is() -> None:
    assert "decode says: [red]x[/]" in printed(samples.results(texts={"1 long": "[red]x[/]"}))


def test_the_picture_shows_each_layer_against_the_forward() -> None:
    run = samples.prefill()
    lines = [line.plain for line in draw(Timeline(run.forwards, run.spans, run.written, 102.125, 2), 52)]
    assert lines[:5] == [
        "forward   " + 19 * "▬" + 21 * "▭",
        "layer 0    ··········░░█████   ··········░░█████ │",
        "layer 1            ··░░█████           ··░░█████ │",
        "draft                        ███                 ███",
        "aux                                              ███",
    ]
    assert lines[-1].endswith("2.125 s in all, 125.0 ms of it exposed")


def test_the_picture_survives_missing_stamps_and_narrow_terminals() -> None:
    run = samples.prefill(spans=[Span(0, (0,), "group", 1, 1)], written=[])
    lines = draw(Timeline(run.forwards, run.spans, run.written, 102.0, 2), 5)
    assert [line.plain.split()[0] for line in lines[:2]] == ["forward", "layer"]


def test_the_json_has_every_field() -> None:
    content = json.loads(json.dumps(files.as_json(samples.results())))
    assert {key: content[key] for key in ("ok", "engine", "completion_mode", "model")} == {
        "ok": True,
        "engine": "mooncake",
        "completion_mode": "one-block",
        "model": "Tiny",
    }
    (prompt,) = content["prompts"]
    expected = {"tokens": 40, "chunks": 2, "pages": 3, "bytes": 2_500_000, "layers_fired": 4, "layers_fallback": 2}
    assert {key: prompt[key] for key in expected} == expected
    assert all(prompt[f"{what}_equal"] is True for what in ("tokens", "logits", "pages", "draft"))
    assert set(prompt["modes"]) == {"single", "monolithic", "layerwise", "monolithic_paced", "layerwise_paced"}
    for timing in prompt["modes"].values():
        assert set(timing) == {"forward_s", "exposed_s", "ttft_s"}


def test_the_trace_is_a_chrome_trace_with_every_transfer() -> None:
    content = json.loads(json.dumps(files.as_trace(samples.results())))
    events = content["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"1 long: {mode}" for mode in samples.case().transfers}
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    forwards = [event for event in events if event["name"] in ("forward 1", "forward 2")]
    assert len(forwards) == 2 * 8
    assert all(event["dur"] == pytest.approx(1e6) for event in forwards)


def test_bars_of_one_track_never_overlap_and_every_track_has_a_name() -> None:
    events = files.as_trace(samples.results())["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) <= named
    for bars in tracks.values():
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(bars)))


def test_a_file_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"ok": True})
    assert json.loads((tmp_path / "a.json").read_text()) == {"ok": True}
    (tmp_path / "dir").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        files.write_json(tmp_path / "dir", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "dir"]
