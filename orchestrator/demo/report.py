"""What the demo prints: a table, the generated texts, and the picture of one transfer."""

from __future__ import annotations

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
    "monolithic_paced": "monolithic, paced",
    "layerwise_paced": "layer-wise, paced",
}


def show(results: Results, console: Console) -> None:
    """Print everything."""
    console.print(table(results))
    console.print(
        "Monolithic: a chunk is sent after its own forward. Layer-wise: its layers are sent while the forward runs.\n"
        f"Paced: a virtual link of {results.link_gbps:g} Gb/s carries every submission of either mode alike; loopback "
        "is too fast to show much.\n"
        "Exposed: from the end of the forward until the decode may use the KV. Medians where a way ran several times.",
        style="dim",
        highlight=False,
    )
    for case in results.cases:
        show_case(case, results.texts.get(case.name, ""), console)
    for case in results.cases:
        for remark in case.equal.remarks:
            console.print(f"[red]{escape(case.name)}: {escape(remark)}[/]", highlight=False)
    verdict = "[bold green]EQUAL[/]" if results.ok else "[bold red]NOT EQUAL[/]"
    console.print(f"{verdict}: tokens, logits, pages and draft pages against the single-process run, bit by bit.")


def table(results: Results) -> Table:
    """One row per prompt and mode."""
    grid = Table(
        title=f"{results.model} over {results.engine} (completion: {results.completion_mode})", title_style="bold"
    )
    for heading in ("prompt", "way"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("tokens", "pages", "MB", "forward s", "exposed ms", "first token s"):
        grid.add_column(heading, justify="right")
    for heading in ("tokens equal", "logits", "pages", "draft"):
        grid.add_column(heading, justify="center")
    for case in results.cases:
        for number, (mode, timing) in enumerate(case.timings.items()):
            name = case.name if number == 0 else ""
            grid.add_row(*_row(case, name, mode, timing), end_section=number == len(case.timings) - 1)
    return grid


def _row(case: Case, name: str, mode: str, timing: Timing) -> list[str]:
    runs = case.transfers.get(mode, [])
    times = f" ×{len(runs)}" if len(runs) > 1 else ""
    cells = [escape(name), TITLES[mode] + times]
    if runs:
        equal = runs[0].equal
        for run in runs[1:]:
            equal &= run.equal
        prefix = f" ({case.decode_prefix} kept)" if case.decode_prefix else ""
        cells += [f"{len(case.ids)}{prefix}", str(case.pages), f"{runs[-1].prefill.bytes / 1e6:.1f}"]
        marks = _marks(equal)
    else:
        prefix = f" ({case.prefill_prefix} kept)" if case.prefill_prefix else ""
        cells += [f"{len(case.ids)}{prefix}", "–", "–"]
        marks = ["–"] * 4
    exposed = f"{timing.exposed_s * 1e3:.1f}" if runs else "–"
    return [*cells, f"{timing.forward_s:.3f}", exposed, f"{timing.ttft_s:.3f}", *marks]


def _marks(equal: Equal) -> list[str]:
    flags = (equal.tokens, equal.logits, equal.pages, equal.draft)
    return ["[green]yes[/]" if flag else "[bold red]NO[/]" for flag in flags]


def show_case(case: Case, text: str, console: Console) -> None:
    """The text the decode generated, the gain, and the picture of the last layer-wise transfer."""
    transfer = case.layerwise
    if transfer is None:
        return
    console.rule(escape(case.name), align="left")
    console.print(f"[bold]decode says:[/] {escape(text.strip())}", highlight=False)
    for suffix in ("", "_paced"):
        console.print(*gain(case, suffix), highlight=False)
    console.print()
    for line in draw(timeline(transfer), console.width):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)


def gain(case: Case, suffix: str) -> list[str]:
    """Layer-wise against monolithic, in one sentence; nothing if one of them did not run."""
    monolithic, layerwise = (case.timings.get(mode + suffix) for mode in ("monolithic", "layerwise"))
    if monolithic is None or layerwise is None:
        return []
    runs = len(case.transfers["layerwise" + suffix])
    median = f", median of {runs}" if runs > 1 else ""
    link = "paced link" if suffix else "loopback"
    return [
        f"exposed over {link}{median}: monolithic {monolithic.exposed_s * 1e3:.1f} ms, "
        f"layer-wise {layerwise.exposed_s * 1e3:.1f} ms"
    ]


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
