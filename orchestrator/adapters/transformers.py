"""A paged KV pool and cache for Hugging Face models, with a hook at the end of every layer's write.

The pool holds one K and one V tensor per layer, ``[pages, page_size, heads, dim]``; a request owns a list of pages in
request order. :class:`PagedCache` is the model's own cache interface over such a list: the model calls ``update`` once
per layer and forward, in layer order and *before* that layer's attention, so a callback at the end of ``update`` is
the natural end-of-layer hook and the model needs no change. The bytes of that layer are final there on a CPU; on a GPU
they are only ordered on the current stream, and the forward pass handle records its event there.

Sizes come from a probe forward, never from the config: DeepSeek-V3 keeps a latent in "keys" and another size in
"values", and Gemma 3n writes fewer layers than it has.

Wants transformers 5.24 or newer (``cache=`` is the keyword since then). Call everything under
``torch.inference_mode()``, from one thread; only :meth:`PagedPool.describe` is for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from protocols.errors import ConfigError
from protocols.layout import LayerBuffer

PROBE_TOKENS = 7
HASH_BYTES = 8
AUX_WORDS = 8
"""64-bit words in one aux slot: the first token, then room for what a later version adds."""


class LayerShape(NamedTuple):
    """What one layer writes per token: (heads, dim) of K and of V."""

    layer: int
    k: tuple[int, int]
    v: tuple[int, int]


class PoolShape(NamedTuple):
    """The layers that write KV, in the order in which a forward writes them, and the type of an element."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype


class Region(NamedTuple):
    """One tensor of a pool: its kvferry kind, its layer (0 for aux) and whether a layer's hook makes it final."""

    kind: str
    layer: int
    tensor: torch.Tensor
    hooked: bool

    @property
    def name(self) -> str:
        return f"{self.kind}[{self.layer}]"


class _Probe(DynamicCache):  # type: ignore[misc,unused-ignore]
    """A stock cache that writes down what each layer puts into it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[LayerShape] = []
        self.dtype = torch.float32

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = key_states.shape, value_states.shape
        self.seen.append(LayerShape(layer_idx, (k[1], k[3]), (v[1], v[3])))
        self.dtype = key_states.dtype
        result: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return result


def probe(model: Any) -> PoolShape:
    """Run a few tokens through ``model`` and say which layers write KV, in which order and of which size.

    Raises ConfigError for a model whose layers keep another kind of state (recurrent, convolutional) or write twice.
    """
    cache = _Probe()
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, PROBE_TOKENS), dtype=torch.long), cache=cache, use_cache=True, logits_to_keep=1)
    order = [shape.layer for shape in cache.seen]
    if not order or order != sorted(set(order)):
        raise ConfigError("this model's layers do not each write their KV once per forward", layers=order)
    return PoolShape(tuple(cache.seen), cache.dtype)


class PagedPool:
    """The KV memory of one worker. Its tensors never move, so their addresses may be registered with an engine.

    One more *draft* layer, as large as the last one, stands for what a draft model (MTP, EAGLE) would keep: no hook
    ever fires for it. ``aux_slots`` slots of 64 bytes carry the first token. The pool starts poisoned.
    """

    def __init__(self, shape: PoolShape, *, pages: int, page_size: int, aux_slots: int) -> None:
        def tensor(per_token: tuple[int, int]) -> torch.Tensor:
            return torch.empty((pages, page_size, *per_token), dtype=shape.dtype)

        self.shape = shape
        self.pages = pages
        self.page_size = page_size
        self.k = {layer.layer: tensor(layer.k) for layer in shape.layers}
        self.v = {layer.layer: tensor(layer.v) for layer in shape.layers}
        last = shape.layers[-1]
        self.draft_layer = last.layer + 1
        self.draft_k, self.draft_v = tensor(last.k), tensor(last.v)
        self.aux = torch.empty((aux_slots, AUX_WORDS), dtype=torch.int64)
        self.poison(range(pages), range(aux_slots))

    def regions(self) -> Iterator[Region]:
        """Every tensor, in the order of the layout."""
        for layer in self.k:
            yield Region("k", layer, self.k[layer], True)
            yield Region("v", layer, self.v[layer], True)
        yield Region("draft_k", self.draft_layer, self.draft_k, False)
        yield Region("draft_v", self.draft_layer, self.draft_v, False)
        yield Region("aux", 0, self.aux, False)

    def describe(self) -> tuple[LayerBuffer, ...]:
        """The pool as kvferry's layer buffers; ids count from 0 in the order of :meth:`regions`."""
        return tuple(
            LayerBuffer(
                id=index,
                kind=region.kind,
                layer=region.layer,
                address=region.tensor.data_ptr(),
                nbytes=region.tensor.nbytes,
                item_len=region.tensor.nbytes // region.tensor.shape[0],
                hooked=region.hooked,
            )
            for index, region in enumerate(self.regions())
        )

    def poison(self, pages: Sequence[int], aux_slots: Sequence[int]) -> None:
        """Fill pages with NaN and aux slots with an impossible value, so that whatever does not arrive shows."""
        for region in self.regions():
            rows = aux_slots if region.kind == "aux" else pages
            value = float("nan") if region.tensor.is_floating_point() else torch.iinfo(region.tensor.dtype).min
            region.tensor[torch.tensor(list(rows), dtype=torch.long)] = value

    def digest(self, pages: Sequence[int], tokens: int) -> dict[str, list[str]]:
        """One hash per page and tensor, by the tensor's name, pages in request order.

        The last page is hashed up to the last of ``tokens`` only, then once more as a whole (the last entry): another
        pool with the same request agrees on all but that one, and a copy of the pages agrees on that too.
        """
        return {
            region.name: page_hashes((region.tensor[page] for page in pages), self.page_size, tokens)
            for region in self.regions()
            if region.kind != "aux"
        }

    def write_draft(self, pages: Sequence[int], first: int, content: Callable[[str, int, int], bytes]) -> None:
        """Fill the draft layer of ``pages``; the first of them is page ``first`` of the request.

        ``content(kind, position, nbytes)`` gives the bytes of one page of one draft tensor.
        """
        for kind, tensor in (("draft_k", self.draft_k), ("draft_v", self.draft_v)):
            for offset, page in enumerate(pages):
                row = tensor[page]
                data = bytearray(content(kind, first + offset, row.nbytes))
                row.copy_(torch.frombuffer(data, dtype=row.dtype).view(row.shape))


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call,misc,unused-ignore]
    """One layer of one request. The length is this layer's own: the mask is built from layer 0 before later layers
    have written, so a shared counter would misplace their tokens."""

    is_sliding = False

    def __init__(self, layer: int, pool: PagedPool, table: torch.Tensor, length: int, on_write: OnWrite | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.is_initialized = True
        self.layer = layer
        self.page_size = pool.page_size
        self.table = table
        self.length = length
        self.on_write = on_write
        self._k, self._v = pool.k[layer], pool.v[layer]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there."""

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length of K and V, offset of the first), asked before ``update``."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return len(self.table) * self.page_size

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, heads, t, dim]`` behind what is there, fire the hook, return K and V of the whole sequence."""
        if key_states.shape[0] != 1:
            raise ValueError(f"a paged cache holds one sequence, not a batch of {key_states.shape[0]}")
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.get_max_length():
            raise ValueError(f"{end} tokens do not fit in {len(self.table)} pages of {self.page_size}")
        position = torch.arange(start, end)
        slot = self.table[position // self.page_size] * self.page_size + position % self.page_size
        for tensor, new in ((self._k, key_states), (self._v, value_states)):
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, slot, new[0].transpose(0, 1))
        self.length = end
        if self.on_write is not None:
            self.on_write(self.layer)
        if start == 0:
            return key_states, value_states
        return self._gather(self._k), self._gather(self._v)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise NotImplementedError("a paged cache holds one sequence: no beams")

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        used = self.table[: -(-self.length // self.page_size)]
        return tensor.index_select(0, used).flatten(0, 1)[: self.length].transpose(0, 1).unsqueeze(0)


OnWrite = Callable[[int], None]


class PagedCache(Cache):  # type: ignore[misc,unused-ignore]
    """One request's pages as the model's cache: ``model(input_ids=…, cache=PagedCache(…), use_cache=True)``.

    ``pages`` is the request's page list in request order; ``length`` tokens of it are there already (a prefix kept from
    an earlier request, or what a transfer brought). ``on_write(layer)`` runs in the forward's thread when the layer's
    K and V are in the pool, before its attention; it must be quick and must not raise.
    """

    def __init__(
        self, pool: PagedPool, pages: Sequence[int], *, length: int = 0, on_write: OnWrite | None = None
    ) -> None:
        table = torch.tensor(list(pages), dtype=torch.long)
        super().__init__(layers=[PagedLayer(layer, pool, table, length, on_write) for layer in pool.k])


def page_hashes(pages: Iterator[torch.Tensor], page_size: int, tokens: int) -> list[str]:
    """Hashes of consecutive pages ``[page_size, …]``, the last cut at ``tokens``, then the last one uncut."""
    hashes, row = [], None
    for position, row in enumerate(pages):
        hashes.append(tensor_hash(row[: tokens - position * page_size]))
    return hashes if row is None else [*hashes, tensor_hash(row)]


def tensor_hash(tensor: torch.Tensor) -> str:
    """Hash of the bytes (not of the values: NaN differs from itself, and 0.0 equals -0.0)."""
    return blake2b(tensor.contiguous().view(torch.uint8).numpy().data, digest_size=HASH_BYTES).hexdigest()
