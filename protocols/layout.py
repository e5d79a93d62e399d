"""What a worker's memory looks like, and whether two workers' layouts fit.

A layout travels whole in Hello. Buffers pair by (kind, layer), never by position (E7), so a pipeline stage simply
lists the layers it owns. What differs, and what is not supported yet, is refused with the fields named (E3).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocols.errors import LayoutError, RefusedError

Unit = Literal["page", "aux", "state", "scratch"]
CpMode = Literal["none", "contiguous", "zigzag", "interleaved"]

UNIT_OF_KIND: dict[str, Unit] = {"aux": "aux", "state": "state", "scratch": "scratch"}
"""Kinds that are not paged KV. Every other kind (``k``, ``v``, ``mla``, ``draft_k``, …) is a page buffer."""

SUPPORTED_CP: frozenset[str] = frozenset({"none", "contiguous", "zigzag"})
MUST_BE_EQUAL = ("page_size", "dtype", "contract", "num_layers", "kv_heads", "head_dim", "page_order", "group_order")
MAX_BUFFERS = 4096

MAX_NATURAL = 2**63 - 1
Natural = Annotated[int, Meta(ge=0, le=MAX_NATURAL)]
Positive = Annotated[int, Meta(ge=1, le=MAX_NATURAL)]


class LayerBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """One registered buffer: ``nbytes`` bytes at ``address``, cut into items of ``item_len`` bytes.

    An item is a page of ``page_size`` tokens for page buffers, a slot for aux, a row for state. ``hooked`` says
    whether the forward has an end-of-layer hook for it; a draft (MTP) buffer has none and is planned for the fallback.
    """

    id: Natural
    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    layer: Natural
    address: Natural
    nbytes: Positive
    item_len: Positive
    hooked: bool = True

    @property
    def unit(self) -> Unit:
        return UNIT_OF_KIND.get(self.kind, "page")

    @property
    def items(self) -> int:
        """How many pages, slots or rows it holds."""
        return self.nbytes // self.item_len

    @property
    def name(self) -> str:
        return f"{self.kind}[{self.layer}]"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The memory and the place of one rank. Sizes are bytes, ``page_size`` is tokens."""

    page_size: Positive
    dtype: Annotated[str, Meta(min_length=1, max_length=32)]
    contract: Annotated[str, Meta(max_length=256)]
    """The embedder's word for the code that writes and reads the KV, e.g. engine name and version."""
    num_layers: Positive
    """Layers of the whole model; a pipeline stage lists only its own buffers."""
    buffers: Annotated[tuple[LayerBuffer, ...], Meta(max_length=MAX_BUFFERS)]
    kv_heads: Natural = 0
    """KV heads of the whole model (0 for MLA)."""
    head_dim: Natural = 0
    page_order: Annotated[str, Meta(max_length=32)] = "NHD"
    """Order of the axes within a page: tokens, heads, dim."""
    group_order: Annotated[str, Meta(max_length=32)] = "layer"
    memory: Annotated[str, Meta(max_length=32)] = "host"
    """Where the pool lies: ``host`` or ``cuda``. Sides may differ; page digests need host memory."""
    tp_rank: Natural = 0
    tp_size: Positive = 1
    pp_rank: Natural = 0
    pp_size: Positive = 1
    cp_rank: Natural = 0
    cp_size: Positive = 1
    cp_mode: CpMode = "none"
    dp_rank: Natural = 0
    dp_size: Positive = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if rank >= size:
                raise LayoutError(f"{axis}_rank must be below {axis}_size", rank=rank, size=size)
        if (self.cp_size > 1) != (self.cp_mode != "none"):
            raise LayoutError(
                "cp_mode says how pages are split over cp_size ranks", mode=self.cp_mode, size=self.cp_size
            )
        seen_ids: set[int] = set()
        seen_names: set[tuple[str, int]] = set()
        pages: set[int] = set()
        for buffer in self.buffers:
            if buffer.id in seen_ids:
                raise LayoutError("two buffers have one id", id=buffer.id)
            if (buffer.kind, buffer.layer) in seen_names:
                raise LayoutError("two buffers have one kind and layer", buffer=buffer.name)
            if buffer.nbytes % buffer.item_len:
                raise LayoutError(
                    "a buffer must be a whole number of items",
                    buffer=buffer.name,
                    nbytes=buffer.nbytes,
                    item_len=buffer.item_len,
                )
            if buffer.address + buffer.nbytes > 2**63 - 1:
                raise LayoutError("a buffer ends beyond 63 bits", buffer=buffer.name)
            if buffer.unit == "page":
                pages.add(buffer.items)
                if buffer.item_len % self.page_size:
                    raise LayoutError(
                        "a page must be a whole number of tokens",
                        buffer=buffer.name,
                        item_len=buffer.item_len,
                        page_size=self.page_size,
                    )
            seen_ids.add(buffer.id)
            seen_names.add((buffer.kind, buffer.layer))
        if len(pages) > 1:
            raise LayoutError("page buffers must hold equally many pages: one index space", pages=sorted(pages))

    @property
    def num_pages(self) -> int:
        """Pages of the pool, 0 without page buffers."""
        return next((buffer.items for buffer in self.buffers if buffer.unit == "page"), 0)

    def unit_buffers(self, unit: Unit) -> tuple[LayerBuffer, ...]:
        """The buffers of one unit, in the layout's order."""
        return tuple(buffer for buffer in self.buffers if buffer.unit == unit)

    def units_of(self, unit: Unit) -> int:
        """How many units of that kind a room can name: the smallest count over its buffers."""
        return min((buffer.items for buffer in self.buffers if buffer.unit == unit), default=0)

    @property
    def is_mla(self) -> bool:
        """MLA keeps one latent per token, replicated over tensor-parallel ranks."""
        return any(buffer.kind == "mla" for buffer in self.buffers)

    @property
    def splits_heads(self) -> bool:
        """True if a page buffer (``k``, ``v``, ``draft_k``, …) holds the heads of one tensor-parallel rank."""
        return any(buffer.kind.rpartition("_")[2] in ("k", "v") for buffer in self.unit_buffers("page"))

    @property
    def fingerprint(self) -> str:
        """Hex digest of what must be equal on both sides, whatever the rank."""
        facts = [getattr(self, name) for name in MUST_BE_EQUAL]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]


class Pair(msgspec.Struct, frozen=True):
    """One source buffer and the destination buffer it is written to; both have one ``item_len``."""

    src: LayerBuffer
    dst: LayerBuffer


def pair_layouts(source: Layout, target: Layout) -> tuple[Pair, ...]:
    """Which source buffer goes to which destination buffer, in the source's order.

    Raises RefusedError naming every field that differs, or the value that is not supported yet and why.
    """
    differing = {
        name: f"{getattr(source, name)!r} != {getattr(target, name)!r}"
        for name in MUST_BE_EQUAL
        if getattr(source, name) != getattr(target, name)
    }
    if differing:
        raise RefusedError("the layouts differ (prefill != decode)", **differing)
    _refuse_unsupported(source, target)
    targets = {(buffer.kind, buffer.layer): buffer for buffer in target.buffers if buffer.unit != "scratch"}
    pairs: list[Pair] = []
    problems: dict[str, str] = {}
    for buffer in source.buffers:
        if buffer.unit == "scratch":
            continue
        peer = targets.pop((buffer.kind, buffer.layer), None)
        if peer is None:
            problems[buffer.name] = "only on the prefill"
        elif peer.item_len != buffer.item_len:
            problems[buffer.name] = f"item_len {buffer.item_len} != {peer.item_len}"
        else:
            pairs.append(Pair(buffer, peer))
    if source.pp_size == target.pp_size:
        problems |= {buffer.name: "only on the decode" for buffer in targets.values() if buffer.unit == "page"}
    if problems:
        shown = dict(list(problems.items())[:8])
        raise RefusedError("the buffers differ (prefill != decode)", buffers=len(problems), **shown)
    return tuple(pairs)


def _refuse_unsupported(source: Layout, target: Layout) -> None:
    if source.cp_mode not in SUPPORTED_CP:
        raise RefusedError("context parallel below page grain is not supported", cp_mode=source.cp_mode)
    if target.cp_size != 1:
        raise RefusedError("a decode rank with context parallelism is not supported", cp_size=target.cp_size)
    if target.pp_size not in (1, source.pp_size) or (target.pp_size > 1 and target.pp_rank != source.pp_rank):
        raise RefusedError(
            "decode pipeline stages must be one, or the prefill's own",
            prefill=f"{source.pp_rank}/{source.pp_size}",
            decode=f"{target.pp_rank}/{target.pp_size}",
        )
    if source.is_mla and target.is_mla and not (source.splits_heads or target.splits_heads):
        return
    if (source.tp_size, source.tp_rank) != (target.tp_size, target.tp_rank):
        raise RefusedError(
            "other tensor-parallel sizes or ranks need head slicing, which is not supported yet",
            prefill=f"{source.tp_rank}/{source.tp_size}",
            decode=f"{target.tp_rank}/{target.tp_size}",
        )
