"""The pool and cache of the transformers adapter, against the stock cache, on tiny random models."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from orchestrator.adapters.transformers import AUX_WORDS, PagedCache, PagedPool, page_hashes, probe  # noqa: E402
from protocols.errors import ConfigError  # noqa: E402

PAGE_SIZE = 8
PAGES = 24
PROMPT = 45


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_llama(**changes: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def pool(model: Any) -> PagedPool:
    return PagedPool(probe(model), pages=PAGES, page_size=PAGE_SIZE, aux_slots=4)


def prompt() -> Any:
    return torch.randint(0, 97, (1, PROMPT), generator=torch.Generator().manual_seed(2))


def scattered(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(PAGES), count)


def run(model: Any, cache: Any, ids: Any, chunk: int, start: int = 0, steps: int = 5) -> list[bytes]:
    """Chunked prefill and greedy decode; the bytes of the logits after each chunk and step."""
    seen = []
    with torch.inference_mode():
        for first in range(start, ids.shape[1], chunk):
            out = model(input_ids=ids[:, first : first + chunk], cache=cache, use_cache=True, logits_to_keep=1)
            seen.append(out.logits[0, -1].numpy().tobytes())
        for _ in range(steps):
            token = out.logits[0, -1].argmax().view(1, 1)
            out = model(input_ids=token, cache=cache, use_cache=True, logits_to_keep=1)
            seen.append(out.logits[0, -1].numpy().tobytes())
    return seen


@pytest.mark.row("A15")
@pytest.mark.parametrize("chunk", [100, 16, 13, 3])
def test_logits_are_bitwise_those_of_the_stock_cache(model: Any, pool: PagedPool, chunk: int) -> None:
    ids = prompt()
    paged = run(model, PagedCache(pool, scattered(8)), ids, chunk)
    stock = run(model, transformers.DynamicCache(), ids, chunk)
    assert paged == stock


@pytest.mark.row("E6")
def test_a_kept_prefix_and_recycled_pages_give_the_same_logits(model: Any, pool: PagedPool) -> None:
    ids, chunk, prefix = prompt(), 16, 2 * PAGE_SIZE
    pages = scattered(8)
    first = run(model, PagedCache(pool, pages), ids, chunk)
    kept, recycled = pages[:2], pages[:1:-1]
    pool.poison(recycled, [])
    again = run(model, PagedCache(pool, kept + recycled, length=prefix), ids, chunk, start=prefix)
    assert again == first[1:], "chunks begin at the same tokens, so their logits agree to the bit"


def test_the_hook_fires_once_per_layer_in_order_when_the_bytes_are_there(model: Any, pool: PagedPool) -> None:
    pages, fired = scattered(8), []

    def on_write(layer: int) -> None:
        rows = pool.k[layer][pages].flatten(0, 1)[:PROMPT]
        fired.append((layer, bool(torch.isfinite(rows).all())))

    run(model, PagedCache(pool, pages, on_write=on_write), prompt(), chunk=100, steps=0)
    assert fired == [(0, True), (1, True), (2, True)]


def test_every_page_is_poisoned_until_it_is_written(model: Any, pool: PagedPool) -> None:
    pages = scattered(8)
    run(model, PagedCache(pool, pages), prompt(), chunk=16, steps=0)
    for tensor in (*pool.k.values(), *pool.v.values()):
        written = torch.isfinite(tensor).flatten(1).all(1)
        assert sorted(written.nonzero().flatten().tolist()) == sorted(pages[:5]), "full pages only"
        assert torch.isnan(tensor[pages[5], PROMPT % PAGE_SIZE :]).all(), "the tail of the last page stays poison"
    assert int(pool.aux.max()) < 0
    pool.poison(pages[:1], [0])
    assert torch.isnan(pool.k[0][pages[0]]).all()


def test_digests_agree_with_another_pool_up_to_the_last_token_and_see_one_bit(model: Any, pool: PagedPool) -> None:
    ids, here, there = prompt(), scattered(6), scattered(6, seed=9)
    other = PagedPool(probe(model), pages=PAGES, page_size=PAGE_SIZE, aux_slots=1)
    other.poison([], [])
    other.k[0][there[5], -1] = 5.0  # the tail of the last page, beyond the last token
    for owner, pages in ((pool, here), (other, there)):
        run(model, PagedCache(owner, pages), ids, chunk=16, steps=0)
        owner.write_draft(pages, 0, lambda kind, position, nbytes: bytes([len(kind), position] * (nbytes // 2)))
    a, b = pool.digest(here, PROMPT), other.digest(there, PROMPT)
    assert list(a) == [f"{kind}[{layer}]" for layer in range(3) for kind in "kv"] + ["draft_k[3]", "draft_v[3]"]
    assert all(len(hashes) == 7 for hashes in a.values())
    assert {name: hashes[:6] for name, hashes in a.items()} == {name: hashes[:6] for name, hashes in b.items()}
    assert a["k[0]"][6] != b["k[0]"][6]
    pool.v[2].view(torch.uint8)[here[3], 0, 0, 0] ^= 1
    assert [i for i, (x, y) in enumerate(zip(pool.digest(here, PROMPT)["v[2]"], a["v[2]"], strict=True)) if x != y] == [
        3
    ]


def test_page_hashes_of_the_stock_cache_are_those_of_the_pool(model: Any, pool: PagedPool) -> None:
    ids, pages, stock = prompt(), scattered(6), transformers.DynamicCache()
    run(model, PagedCache(pool, pages), ids, chunk=16, steps=0)
    run(model, stock, ids, chunk=16, steps=0)
    keys = stock.layers[1].keys[0].transpose(0, 1)
    assert page_hashes(iter(keys.split(PAGE_SIZE)), PAGE_SIZE, PROMPT)[:6] == pool.digest(pages, PROMPT)["k[1]"][:6]
    assert page_hashes(iter(()), PAGE_SIZE, 0) == []


def test_the_description_covers_every_byte_of_the_pool(pool: PagedPool) -> None:
    buffers = pool.describe()
    assert [buffer.id for buffer in buffers] == list(range(9))
    assert [buffer.name for buffer in buffers][-4:] == ["v[2]", "draft_k[3]", "draft_v[3]", "aux[0]"]
    assert [buffer.hooked for buffer in buffers] == [True] * 6 + [False] * 3
    assert buffers[0].item_len == PAGE_SIZE * 2 * 8 * 4
    assert {buffer.items for buffer in buffers[:-1]} == {PAGES}
    assert (buffers[-1].items, buffers[-1].item_len) == (4, AUX_WORDS * 8)
    assert buffers[0].address == pool.k[0].data_ptr()


@pytest.mark.row("A15")
def test_sizes_come_from_the_probe_when_k_and_v_differ() -> None:
    """DeepSeek-V3 keeps a latent as K and the rotated part as V; both travel, each with its own page size."""
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=24,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    shape = probe(model)
    assert [(layer.k, layer.v) for layer in shape.layers] == [((1, 24), (1, 8))] * 2
    pool = PagedPool(shape, pages=PAGES, page_size=PAGE_SIZE, aux_slots=1)
    assert [buffer.item_len for buffer in pool.describe()[:2]] == [PAGE_SIZE * 24 * 4, PAGE_SIZE * 8 * 4]
    ids = prompt()
    assert run(model, PagedCache(pool, scattered(8)), ids, 16) == run(model, transformers.DynamicCache(), ids, 16)


def test_a_table_that_is_too_short_says_so(model: Any, pool: PagedPool) -> None:
    with pytest.raises(ValueError, match="45 tokens do not fit in 5 pages of 8"):
        run(model, PagedCache(pool, scattered(5)), prompt(), chunk=100)


def test_batches_and_beams_are_refused(model: Any, pool: PagedPool) -> None:
    cache = PagedCache(pool, scattered(8))
    with pytest.raises(ValueError, match="not a batch of 2"):
        run(model, cache, prompt().repeat(2, 1), chunk=100)
    with pytest.raises(NotImplementedError, match="no beams"):
        cache.layers[0].reorder_cache(torch.tensor([0]))


def test_a_model_that_writes_its_layers_twice_is_refused() -> None:
    class Twice:
        def __call__(self, *, cache: Any, **_: Any) -> None:
            for _time in range(2):
                cache.update(torch.zeros(1, 1, 7, 4), torch.zeros(1, 1, 7, 4), 0)

    with pytest.raises(ConfigError, match="once per forward"):
        probe(Twice())
