"""What the demo prints: a table for each prompt, the generated texts, and the picture of one transfer each."""

from __future__ import annotations

from functools import reduce
from operator import and_

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.demo.driver import Results
from orchestrator.demo.picture import Timeline, draw
from orchestrator.demo.verdict import Case, Equal, Timing, Transfer

TITLES = {
    "single": "single process",
    "monolithic": "monolithic",
    "layerwise": "layer-wise",
    "monolithic_paced": "monolithic paced",
    "layerwise_paced": "layer-wise paced",
}
FIGURES = ("MB", "forward\ns", "exposed\nms", "token 1\ns")
EQUALS = ("tokens\nequal", "logits\nequal", "pages\nequal", "draft\nequal")


def show(results: Results, console: Console) -> None:
    """Print everything."""
    what = f"{results.model} over {results.engine}, completion mode {results.completion_mode}"
    console.print(f"[bold]{escape(what)}[/]", highlight=False)
    for case in results.cases:
        console.print(table(case))
    console.print(
        "Monolithic: a chunk is sent after its own forward. Layer-wise: its layers are sent while the forward runs. "
        f"Paced: a virtual link of {results.link_gbps:g} Gb/s carries every submission of either way alike, because "
        "loopback is too fast to show much. Exposed: from the end of the forward until the decode may use the KV. "
        "Token 1: from the start of the forward until the decode has the first token. ×N: medians of N runs.",
        style="dim",
        highlight=False,
    )
    for case in results.cases:
        show_case(case, results.texts.get(case.name, ""), console)
    console.print()
    for case in results.cases:
        for remark in case.equal.remarks:
            console.print(f"[red]{escape(case.name)}: {escape(remark)}[/]", highlight=False)
    verdict = "[bold green]EQUAL[/]" if results.ok else "[bold red]NOT EQUAL[/]"
    console.print(f"{verdict} to the single process: tokens, logits, pages, draft pages, bit by bit.", highlight=False)


def table(case: Case) -> Table:
    """One row per way. Fits a terminal of 80 columns."""
    title = f"{case.name}: {len(case.ids)} prompt tokens, {case.pages} pages"
    if case.prefill_prefix:
        title += f"; kept prefix: {case.prefill_prefix} on prefill, {case.decode_prefix} on decode"
    grid = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    grid.add_column("way", no_wrap=True)
    for heading in FIGURES:
        grid.add_column(heading, justify="right", no_wrap=True)
    for heading in EQUALS:
        grid.add_column(heading, justify="center", no_wrap=True)
    for mode, timing in case.timings.items():
        grid.add_row(*_row(case, mode, timing))
    return grid


def _row(case: Case, mode: str, timing: Timing) -> list[str]:
    runs = case.transfers.get(mode, [])
    if not runs:
        return [TITLES[mode], "–", f"{timing.forward_s:.3f}", "–", f"{timing.ttft_s:.3f}", *["–"] * len(EQUALS)]
    return [
        TITLES[mode] + (f" ×{len(runs)}" if len(runs) > 1 else ""),
        f"{runs[-1].prefill.bytes / 1e6:.1f}",
        f"{timing.forward_s:.3f}",
        f"{timing.exposed_s * 1e3:.1f}",
        f"{timing.ttft_s:.3f}",
        *_marks(reduce(and_, (run.equal for run in runs))),
    ]


def _marks(equal: Equal) -> list[str]:
    flags = (equal.tokens, equal.logits, equal.pages, equal.draft)
    return ["[green]yes[/]" if flag else "[bold red]NO[/]" for flag in flags]


def show_case(case: Case, text: str, console: Console) -> None:
    """The text the decode generated, the gain, and the picture of the last layer-wise transfer."""
    transfer = case.layerwise
    if transfer is None:
        return
    console.print()
    console.rule(escape(case.name), align="left")
    console.print(f"[bold]decode says:[/] {escape(text.strip())}", highlight=False)
    for suffix in ("", "_paced"):
        if sentence := gain(case, suffix):
            console.print(sentence, highlight=False)
    console.print()
    for line in draw(timeline(transfer), console.width):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)


def gain(case: Case, suffix: str) -> str:
    """Layer-wise against monolithic, in one sentence; empty if one of them did not run."""
    monolithic, layerwise = (case.timings.get(mode + suffix) for mode in ("monolithic", "layerwise"))
    if monolithic is None or layerwise is None:
        return ""
    runs = len(case.transfers["layerwise" + suffix])
    link = "paced link" if suffix else "loopback"
    median = f" (medians of {runs})" if runs > 1 else ""
    return (
        f"exposed, {link}: monolithic {monolithic.exposed_s * 1e3:.1f} ms, "
        f"layer-wise {layerwise.exposed_s * 1e3:.1f} ms{median}"
    )


def timeline(transfer: Transfer) -> Timeline:
    """What the picture needs of one transfer."""
    prefill = transfer.prefill
    return Timeline(
        forwards=prefill.forwards,
        spans=prefill.spans,
        written=prefill.written,
        committed=transfer.decode.committed,
        hooked_layers=len({layer for layer, _ in prefill.written}),
    )
