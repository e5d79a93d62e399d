"""What a run showed: equal or not, bit by bit, and how long it took. Pure; seconds unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from orchestrator.demo import wire

MAX_REMARKS = 3

MODES: tuple[tuple[str, wire.Mode, bool], ...] = (
    ("monolithic", "monolithic", False),
    ("layerwise", "layerwise", False),
    ("monolithic_paced", "monolithic", True),
    ("layerwise_paced", "layerwise", True),
)
"""Name in tables and JSON, how the chunks are sent, whether over the paced link."""


@dataclass(frozen=True, slots=True)
class Equal:
    """Compared with the single-process run, and the pages also with the prefill's."""

    tokens: bool
    logits: bool
    pages: bool
    draft: bool
    remarks: tuple[str, ...] = ()
    """Where a difference lies, the first few."""

    @property
    def all(self) -> bool:
        return self.tokens and self.logits and self.pages and self.draft

    def __and__(self, other: Equal) -> Equal:
        return Equal(
            self.tokens and other.tokens,
            self.logits and other.logits,
            self.pages and other.pages,
            self.draft and other.draft,
            (self.remarks + other.remarks)[:MAX_REMARKS],
        )


ALL_EQUAL = Equal(True, True, True, True)


@dataclass(frozen=True, slots=True)
class Timing:
    """``forward_s``: the prefill's forwards, first token chosen. ``exposed_s``: from their end until the decode may
    use the KV. ``ttft_s``: from the start of the first forward until the decode has the first token."""

    forward_s: float
    exposed_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One prompt sent once."""

    prefill: wire.PrefillRun
    decode: wire.DecodeRun
    equal: Equal

    @property
    def timing(self) -> Timing:
        started, ended = self.prefill.forwards[0][0], self.prefill.forwards[-1][1]
        return Timing(
            forward_s=ended - started,
            exposed_s=max(0.0, self.decode.committed - ended),
            ttft_s=self.decode.first_token_at - started,
        )


@dataclass(slots=True)
class Case:
    """One prompt, run in every mode. The prefixes are tokens that prefill and decode kept from an earlier run (E6)."""

    name: str
    prompt: int
    ids: list[int]
    pages: int
    prefill_prefix: int = 0
    decode_prefix: int = 0
    keep_prefill: int = 0
    keep_decode: int = 0
    """What this case's last runs leave for a later case."""
    single: wire.SingleRun | None = None
    transfers: dict[str, list[Transfer]] = field(default_factory=dict)

    @property
    def equal(self) -> Equal:
        """The AND over all modes and repetitions."""
        result = ALL_EQUAL
        for runs in self.transfers.values():
            for run in runs:
                result &= run.equal
        return result

    @property
    def timings(self) -> dict[str, Timing]:
        """By mode, ``single`` first; medians where a mode ran several times."""
        result = {}
        if self.single is not None:
            result["single"] = Timing(self.single.forward_s, 0.0, self.single.forward_s)
        for name, runs in self.transfers.items():
            timings = [run.timing for run in runs]
            result[name] = Timing(
                forward_s=median(timing.forward_s for timing in timings),
                exposed_s=median(timing.exposed_s for timing in timings),
                ttft_s=median(timing.ttft_s for timing in timings),
            )
        return result

    @property
    def layerwise(self) -> Transfer | None:
        """The last layer-wise run, preferably over the paced link, where the overlap can be seen."""
        runs = self.transfers.get("layerwise_paced") or self.transfers.get("layerwise")
        return runs[-1] if runs else None


def compare(single: wire.SingleRun, prefill: wire.PrefillRun, decode: wire.DecodeRun) -> Equal:
    """Judge one transfer. Tokens alone are a weak test: a swapped or empty page can leave them as they were."""
    logits = [prefill.logits, *decode.logits]
    remarks = []
    if logits != single.logits:
        step = next((i for i, pair in enumerate(zip(logits, single.logits, strict=False)) if pair[0] != pair[1]), None)
        remarks.append(f"logits differ first at step {len(single.logits) if step is None else step}")
    wrong = _wrong_pages(single.pages, prefill.pages, decode.pages)
    remarks += [f"{name}: {len(pages)} wrong pages, the first at position {pages[0]}" for name, pages in wrong.items()]
    return Equal(
        tokens=decode.tokens == single.tokens and decode.tokens[0] == prefill.first_token,
        logits=logits == single.logits,
        pages=not any(not name.startswith("draft") for name in wrong),
        draft=not any(name.startswith("draft") for name in wrong),
        remarks=tuple(remarks[:MAX_REMARKS]),
    )


def _wrong_pages(single: wire.Digests, prefill: wire.Digests, decode: wire.Digests) -> dict[str, list[int]]:
    """By buffer, the positions whose bytes at the decode are neither the prefill's nor the single process's.

    The last entry of each list is the last page with what lies beyond the last token: it was copied as it was.
    """
    wrong = {}
    for name in sorted({*single, *prefill, *decode}):
        here, source, reference = decode.get(name, []), prefill.get(name, []), single.get(name, [])
        if len(here) != len(source) or len(here) != len(reference):
            wrong[name] = [0]
            continue
        last = len(here) - 1
        pages = [i for i, hashed in enumerate(here) if hashed != source[i] or (i < last and hashed != reference[i])]
        if pages:
            wrong[name] = [min(page, last - 1) for page in pages]
    return wrong
