"""The life of every layer of one transfer as a picture for the terminal: time runs to the right, a row is a layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from orchestrator.trace import Span

READY, QUEUED, POSTED = "·", "░", "█"
STYLES = {READY: "dim", QUEUED: "yellow", POSTED: "green", "▬": "cyan", "▭": "blue", "│": "red"}
LABEL_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Timeline:
    """One transfer. Times are monotonic seconds of one machine."""

    forwards: list[tuple[float, float]]
    spans: list[Span]
    written: list[tuple[int, float]]
    """(layer, when its hook ran), in order."""
    committed: float
    hooked_layers: int


def draw(timeline: Timeline, width: int) -> list[Text]:
    """The picture, at most ``width`` columns wide: the forwards on top, one row per layer, a legend below."""
    origin = timeline.forwards[0][0]
    forward_end = timeline.forwards[-1][1]
    end = max([timeline.committed, forward_end, *(span.landed for span in timeline.spans if span.landed is not None)])
    columns = max(10, width - LABEL_WIDTH)
    scale = columns / max(end - origin, 1e-9)

    def column(at: float) -> int:
        return min(columns - 1, max(0, int((at - origin) * scale)))

    def row(label: str, marks: list[tuple[float, float, str]]) -> Text:
        cells = [" "] * columns
        cells[column(forward_end)] = "│"
        for start, stop, mark in marks:
            for cell in range(column(start), column(stop) + 1):
                cells[cell] = mark
        text = Text(label[: LABEL_WIDTH - 1].ljust(LABEL_WIDTH))
        for mark, run in groupby(cells):
            text.append("".join(run), STYLES.get(mark, ""))
        text.rstrip()
        return text

    forwards = [(start, stop, "▬▭"[number % 2]) for number, (start, stop) in enumerate(timeline.forwards)]
    lines = [row("forward", forwards)]
    for layer in sorted({layer for span in timeline.spans for layer in span.layers}):
        label = f"layer {layer}" if layer < timeline.hooked_layers else "draft"
        lines.append(row(label, _marks(timeline, layer)))
    aux = [mark for span in timeline.spans if span.kind == "aux" for mark in _phases(span, span.fired)]
    if aux:
        lines.append(row("aux", aux))
    exposed = max(0.0, timeline.committed - forward_end)
    lines.append(
        Text.assemble(
            " " * LABEL_WIDTH,
            (READY, STYLES[READY]),
            " ready  ",
            (QUEUED, STYLES[QUEUED]),
            " queued  ",
            (POSTED, STYLES[POSTED]),
            " posted until landed  ",
            ("│", STYLES["│"]),
            " end of the forward",
        )
    )
    lines.append(Text(f"{' ' * LABEL_WIDTH}{end - origin:.3f} s in all, {exposed * 1e3:.1f} ms of it exposed"))
    return lines


def _marks(timeline: Timeline, layer: int) -> list[tuple[float, float, str]]:
    """What one layer's row shows. Marks drawn later cover earlier ones, so moving bytes are never hidden."""
    spans = [span for span in timeline.spans if layer in span.layers]
    marks: list[tuple[float, float, str]] = []
    for span in spans:
        marks += _phases(span, _written_before(timeline, layer, span))
    return sorted(marks, key=lambda mark: (READY, QUEUED, POSTED).index(mark[2]))


def _written_before(timeline: Timeline, layer: int, span: Span) -> float | None:
    """When this layer itself was written; the span knows only the last layer of its group."""
    bound = span.queued if span.queued is not None else span.posted
    times = [at for written, at in timeline.written if written == layer and (bound is None or at <= bound)]
    return times[-1] if times else span.fired


def _phases(span: Span, written: float | None) -> list[tuple[float, float, str]]:
    stamps = (written, span.queued if span.queued is not None else span.ready, span.posted, span.landed)
    return [
        (start, stop, mark)
        for start, stop, mark in zip(stamps, stamps[1:], (READY, QUEUED, POSTED), strict=False)
        if start is not None and stop is not None and stop >= start
    ]
